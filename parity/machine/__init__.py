"""What a machine has and allows, asked without torch: GPUs, cores, memory, files."""
