"""A page for each model: what names and modules do not tell of it. Each may be deleted."""

# Of these, names and modules tell everything.
PLAIN = (
    "llama",
    "cohere",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "olmo2",
    "granite",
    "smollm3",
    "bert",
    "modernbert",
    "vit",
    "apertus",
    "whisper",
)
# Of these, which have a decoder, too, the encoder alone is ported.
ENCODERS = ("whisper",)
