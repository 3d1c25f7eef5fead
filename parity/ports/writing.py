"""Write the port of a form as Python."""

from __future__ import annotations

import functools
import importlib
import pprint
import textwrap
from collections.abc import Mapping
from typing import Any

import jinja2

from parity.ports import pages
from parity.ports.form import Config, Form
from parity.ports.reading import Structure, expression_of, read
from parity.ports.small import shrink, without_dropout
from parity.ports.weights import map_weights

# What PyTorch computes an activation by that TE's modules do not fuse: the function, and further arguments.
_IN_TORCH = {
    "gelu": ("F.gelu", ""),
    "gelu_new": ("F.gelu", ', approximate="tanh"'),
    "gelu_pytorch_tanh": ("F.gelu", ', approximate="tanh"'),
    "gelu_fast": ("F.gelu", ', approximate="tanh"'),
    "silu": ("F.silu", ""),
    "swish": ("F.silu", ""),
    "relu": ("F.relu", ""),
    "tanh": ("torch.tanh", ""),
}
# What a model takes: its name and how it is drawn, by a setting that tells it.
_INPUTS = {
    "patch_size": ("pixels", "rng.normal(batch, config.num_channels, config.image_size, config.image_size)"),
    "num_mel_bins": ("features", "rng.normal(batch, config.num_mel_bins, 2 * config.max_source_positions)"),
}
_IDS = "ids", "rng.integers(batch, seq, high=config.vocab_size)"
_NOISE = ("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "_name_or_path", "use_cache")
_OF_BACKBONES = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")


def write(config: Config) -> tuple[str, Form]:
    """Return a port as the text of a Python file, and the form that it was written from.

    Raises:
        UserError: if the model cannot be read.
    """
    structure = Structure(config)
    form = read(structure)
    page = f"{pages.__name__}.{form.kind.removesuffix('_text')}"
    if importlib.util.find_spec(page) is not None:
        importlib.import_module(page).adapt(form, config)
    elif form.kind not in pages.PLAIN:
        form.unknown.append(f"te-parity does not know {form.kind}; this port follows from its names and modules")
    map_weights(structure, form)
    _note_gaps(form, config)
    return _render_port(form, config), form


def _note_gaps(form: Form, config: Config) -> None:
    """Add what every model has to do without in TE."""
    attention, mlp = form.attention, form.mlp
    if mlp.width and not form.te_activation:
        name = f"gated {mlp.activation}" if mlp.gated else mlp.activation
        form.gaps.append(
            f"no fused MLP with {name} (TE's gelu is the one by tanh); PyTorch computes it between two layers"
        )
    elif mlp.width and not form.has_fused_mlp:
        form.gaps.append("no fused MLP without a norm before it; PyTorch computes the activation between two layers")
    if attention.softcap:
        form.gaps.append("only FlashAttention and the unfused kernel cap scores; cuDNN's fused kernel does not")
    if attention.norm_is_wide:
        form.gaps.append(
            "a norm over the queries of all heads is a module of its own; TE's qk_norm_type norms each head"
        )
    if form.norm.kind == "LayerNorm" and not form.norm.bias:
        form.gaps.append("no LayerNorm without a bias; TE's is 0, and a training has to leave it there")
    scaled = _list_scaled(form)
    if scaled:
        form.gaps.append(f"no scaling of rotary frequencies by {', '.join(scaled)}; transformers computes them")
    if form.kind in pages.ENCODERS:
        form.gaps.append(
            "this is the encoder alone, since no decoder with attention to it can be written yet; a checkpoint of the "
            "whole model is converted and proved with --prefix model.encoder. --ignore 'model.decoder.*'"
        )
    rates = _list_rates(form, config)
    if rates:
        form.gaps.append(f"dropout is left out ({', '.join(rates)}), since masks cannot be compared; TE has it")


def _list_rates(form: Form, config: Config) -> dict[str, float]:
    """Return the configuration's rates of dropout and noise, each 0; what sparsemixer calls noise is its threshold."""
    rates = without_dropout(config)
    return {name: rate for name, rate in rates.items() if not (form.draws_experts and name == "router_jitter_noise")}


def _list_scaled(form: Form) -> list[str]:
    kinds = form.positions.kinds.values() if form.positions else ()
    return sorted({kind for kind in kinds if kind != "default"})


def _render_port(form: Form, config: Config) -> str:
    scaled = _list_scaled(form)
    activation, arguments = _IN_TORCH.get(form.mlp.activation, ("", ""))
    if not activation:
        activation = f"ACT2FN[{form.mlp.activation!r}]"
    parameters = config.to_dict()
    inputs = next((_INPUTS[name] for name in _INPUTS if name in parameters), _IDS)
    held = {key: value for key, value in config.to_diff_dict().items() if key not in (*_NOISE, *_OF_BACKBONES)}
    held |= _list_rates(form, config)
    functions = {"build_alibi_tensor": form.attention.alibi, "sparsemixer": form.draws_experts}
    from_home = form.classes[1:] if form.kind in pages.ENCODERS else tuple(filter(functions.get, functions))
    return (
        _read_templates()
        .get_template("port.py.jinja")
        .render(
            form=form,
            config=_show_mapping(held),
            small=_show_mapping(shrink(config)),
            scaled=scaled,
            activation=activation,
            arguments=arguments,
            from_home=from_home,
            inputs=inputs[0],
            pooling=", add_pooling_layer=False" if _takes_pooling(form) else "",
            drawn=inputs[1],
            theta=_show_base(config),
        )
    )


def _show_base(config: Config) -> str:
    """Return the base of the rotation, as the port reads it."""
    if getattr(config, "rope_parameters", None):
        return 'self.config.rope_parameters["rope_theta"]'
    return expression_of(config, "rope_theta").replace("config.", "self.config.") or "10000.0"


def _takes_pooling(form: Form) -> bool:
    """Return whether the model can be built without its pooler, whose result is no part of the last hidden state."""
    kind = getattr(importlib.import_module(form.home), form.classes[1])
    return "add_pooling_layer" in kind.__init__.__code__.co_varnames


def _show_mapping(held: Mapping[str, Any]) -> str:
    """Return a mapping as Python, an entry a line."""
    lines = (f"    {_show_value(name)}: {_show_value(value)}," for name, value in held.items())
    return "\n".join(("{", *lines, "}"))


def _show_value(value: Any) -> str:
    """Return a value as Python; the value of many layers once, and how often."""
    if isinstance(value, list) and len(value) > 2 and all(one == value[0] for one in value):
        return f"{_show_value(value[:1])} * {len(value)}"
    text = textwrap.indent(pprint.pformat(value, compact=True, width=100), "    ").strip()
    return text if '"' in text else text.replace("'", '"')


@functools.cache
def _read_templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("parity.ports", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["bullet"] = _as_bullet
    return environment


def _as_bullet(text: str) -> str:
    return textwrap.fill(f"{text}.", 100, initial_indent="- ", subsequent_indent="  ")
