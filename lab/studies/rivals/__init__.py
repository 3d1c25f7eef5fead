"""What rules that people use for whole language models say of right and wrong ports, beside parity."""
