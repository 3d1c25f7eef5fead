"""Attention: which backend TE is offered, fused and unfused kernels, masks, layouts, rotary embedding, the KV cache."""
