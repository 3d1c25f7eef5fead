"""Processes that compute one thing together, as the ranks of ``torch.distributed``."""
