"""Makes TE choose an attention backend again, for tests that change the environment."""

from __future__ import annotations


def choose_again() -> None:
    """TE keeps its choice until an argument changes, and would not read the environment again."""
    from transformer_engine.pytorch.attention import dot_product_attention

    for module in (dot_product_attention, dot_product_attention.dot_product_attention):
        if hasattr(module, "_attention_backends"):
            module._attention_backends["backend_selection_requires_update"] = True
