"""Find out what a machine has and allows, without torch: GPUs, cores, memory, files and processes."""
