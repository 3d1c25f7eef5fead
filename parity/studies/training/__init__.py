"""Small language models, the text that they learn, and their training with FP32 master weights."""
