"""Right ports in which bugs are planted: a small pair for every module that people port, at two sizes each."""
