"""Golden: the reference in FP64, wherever its code asks for less, in memory that grows linearly with the sequence."""
