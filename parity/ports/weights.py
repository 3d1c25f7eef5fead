"""Write a port's weight map: which names of the model are which of TE's, as Python."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from parity.ports.form import Form
from parity.ports.reading import Structure

Entries = Iterator[tuple[str, str]]


def map_weights(structure: Structure, form: Form) -> None:
    """Fill in the form's weight map."""
    attention = _list_latent if form.attention.latent else _list_attention
    form.weights = [*attention(structure, form), *_list_norms_after(structure), *_list_scales(structure)]
    dense, sparse = [*_list_mlp(structure, form)], [*_list_experts(structure, form)]
    if dense and sparse:
        form.dense, form.sparse = dense, sparse
    else:
        form.weights += dense + sparse
    form.outer = [*_list_outer(structure, form)]


def quote(name: str) -> str:
    """Return a name as Python writes it."""
    return f'"{name}"'


def _write_call(function: str, *terms: str) -> str:
    return f"parity.{function}({', '.join(terms)})"


def _list_norms_after(structure: Structure) -> Entries:
    for role, name in (("norm_after_attention", "attention_norm"), ("norm_after_mlp", "mlp_norm")):
        for kind, held in structure.names.get(role, {}).items():
            yield quote(held), quote(f"{name}.{kind}")


def _list_scales(structure: Structure) -> Entries:
    for role in ("attention_scale", "mlp_scale"):
        if structure.has(role):
            yield quote(structure.names[role]["weight"]), quote(role)


def _list_missing(form: Form, held: Collection[str], name: str) -> Entries:
    """Yield what TE's norm has and the model's has not; the names of its parameters begin with ``name``."""
    kinds = {"weight": "0.0" if form.norm.zero_centered else "1.0"} | (
        {"bias": "0.0"} if form.norm.kind == "LayerNorm" else {}
    )
    for kind, value in kinds.items():
        if kind not in held:
            yield _write_call("constant", value, "config.hidden_size"), quote(f"{name}{kind}")


def _list_attention(structure: Structure, form: Form) -> Entries:
    attention, names = form.attention, structure.names
    transposed = form.transposed
    if form.placement.before:
        for kind, name in names["norm_before_attention"].items():
            ours = quote(f"attention.qkv.layer_norm_{kind}")
            shared = _write_call("copies", ours, quote(f"{mlp_norm(form)}_{kind}"))
            yield quote(name), shared if form.placement.one_norm else ours
        yield from _list_missing(form, names["norm_before_attention"], "attention.qkv.layer_norm_")
    for kind in ("weight", "bias"):
        parts = [quote(f"attention.qkv.{part}_{kind}") for part in ("query", "key", "value")]
        if structure.has("qkv", kind):
            fused = quote(names["qkv"][kind])
            if form.qkv_by_head:
                yield (
                    fused,
                    _write_call(
                        "interleaved_qkv", *parts, f"groups={attention.groups}", f"head_dim={attention.head_dim}"
                    ),
                )
            else:
                yield (
                    _write_call("transpose", fused) if transposed and kind == "weight" else fused,
                    _write_call("stack", *parts),
                )
        for role, part in zip(("query", "key", "value"), parts, strict=True):
            if structure.has(role, kind):
                yield quote(names[role][kind]), part
        if structure.has("out", kind):
            out = quote(names["out"][kind])
            yield (
                _write_call("transpose", out) if transposed and kind == "weight" else out,
                quote(f"attention.out.{kind}"),
            )
    for role, width in (("query", "heads"), ("key", "groups"), ("value", "groups")):
        if attention.biases & {"query", "key", "value"} and role not in attention.biases:
            rows = f"{getattr(attention, width)} * ({attention.head_dim})"
            yield _write_call("constant", "0.0", rows), quote(f"attention.qkv.{role}_bias")
    for role in ("query_norm", "key_norm"):
        for kind, name in names.get(role, {}).items():
            yield quote(name), quote(f"attention.{role}.{kind}")
    if attention.sinks:
        yield quote(names["sinks"]["weight"]), quote("attention.core.softmax_offset")


def _list_latent(structure: Structure, form: Form) -> Entries:
    names = structure.names
    yield quote(names["norm_before_attention"]["weight"]), quote("attention.norm.weight")
    if form.attention.latent and form.attention.latent.low_rank_queries:
        yield quote(names["latent_query_down"]["weight"]), quote("attention.query_down.weight")
        yield quote(names["latent_query_norm"]["weight"]), quote("attention.query.layer_norm_weight")
        yield quote(names["latent_query"]["weight"]), quote("attention.query.weight")
    else:
        yield quote(names["query"]["weight"]), quote("attention.query.weight")
    yield quote(names["latent_down"]["weight"]), quote("attention.down.weight")
    yield quote(names["latent_norm"]["weight"]), quote("attention.up.layer_norm_weight")
    yield quote(names["latent_up"]["weight"]), quote("attention.up.weight")
    yield quote(names["out"]["weight"]), quote("attention.out.weight")


def mlp_norm(form: Form) -> str:
    """Return how the names of the MLP's norm begin."""
    return "mlp.layer_norm" if form.has_fused_mlp else "mlp.fc1.layer_norm"


def _list_mlp(structure: Structure, form: Form) -> Entries:
    names = structure.names
    if not structure.has("down"):
        return
    if form.placement.before:
        norm = names["norm_before_attention" if form.placement.one_norm else "norm_before_mlp"]
        for kind, name in norm.items() if not form.placement.one_norm else ():
            yield quote(name), quote(f"{mlp_norm(form)}_{kind}")
        yield from _list_missing(form, norm, f"{mlp_norm(form)}_")
    joint = "_" if form.has_fused_mlp else "."
    for kind in ("weight", "bias"):
        first, second = quote(f"mlp.fc1{joint}{kind}"), quote(f"mlp.fc2{joint}{kind}")
        turned = form.transposed and kind == "weight"
        if structure.has("gate", kind):
            yield _write_call("stack", quote(names["gate"][kind]), quote(names["up"][kind])), first
        else:
            for role in ("gate_up", "up"):
                if structure.has(role, kind):
                    name = quote(names[role][kind])
                    yield _write_call("transpose", name) if turned else name, first
        if structure.has("down", kind):
            name = quote(names["down"][kind])
            yield _write_call("transpose", name) if turned else name, second
    for kind, name in names.get("activation", {}).items():
        yield quote(name), quote(f"mlp.activation.{kind}")


def _list_experts(structure: Structure, form: Form) -> Entries:
    names = structure.names
    if form.experts is None:
        return
    for kind, name in names["norm_before_mlp"].items():
        yield quote(name), quote(f"mlp.norm.{kind}")
    yield from _list_missing(form, names["norm_before_mlp"], "mlp.norm.")
    for kind, name in names["router"].items():
        yield quote(name), quote(f"mlp.router.{kind}")
    for role, layer in (("experts_in", "fc1"), ("experts_out", "fc2")):
        term = _write_call("experts", quote(f"mlp.{layer}.weight{{e}}"))
        name = quote(names[role]["weight"])
        yield name, _write_call("rearrange", term, '"e o i -> e i o"') if form.experts.transposed else term
        if structure.has(f"{role}_bias"):
            yield quote(names[f"{role}_bias"]["weight"]), _write_call("experts", quote(f"mlp.{layer}.bias{{e}}"))
    if form.experts.shared:
        stacked = _write_call("stack", quote(names["shared_gate"]["weight"]), quote(names["shared_up"]["weight"]))
        yield stacked, quote("mlp.shared_fc1.weight")
        yield quote(names["shared_down"]["weight"]), quote("mlp.shared_fc2.weight")
    if form.experts.shared_gate:
        yield quote(names["shared_weight"]["weight"]), quote("mlp.shared_gate.weight")


def _list_outer(structure: Structure, form: Form) -> Entries:
    """Yield the entries of what is outside the layers."""
    ends = form.ends
    modules = dict(structure.model.named_modules())
    places = {ends.tokens: "embedding", ends.learned: "positions", ends.embedding_norm: "embedding_norm"}
    places[ends.final_norm] = "norm"
    if ends.own is not None and ends.own[0]:
        places[ends.own[0]] = "embeddings"
    elif ends.own is not None:
        for name in structure.path_siblings():
            places[name] = f"embeddings.{name}"
    if not ends.tied:
        places[ends.head] = "head"
    for name, place in places.items():
        for kind, _ in modules[name].named_parameters() if name else ():
            yield quote(f"{name}.{kind}"), quote(f"{place}.{kind}")
    for name in filter(None, (ends.embedding_norm, ends.final_norm)):
        yield from _list_missing(form, dict(modules[name].named_parameters()), f"{places[name]}.")
