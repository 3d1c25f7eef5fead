"""Write a port to TE of a model of Hugging Face's transformers, to start from."""
