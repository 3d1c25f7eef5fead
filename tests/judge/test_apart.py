"""A loss that is returned beside logits is judged as sharply as a loss alone, and so are the logits."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

BATCH, SEQ, HIDDEN, CLASSES, IGNORED = 4, 24, 64, 48, -100


@dataclass
class ModelOutput:
    loss: Tensor
    logits: Tensor


class HuggingFacesOutput(OrderedDict):
    """A mapping by keyword, like the outputs of transformers' models."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        super().__init__(loss=loss, logits=logits)


RETURNED = {
    "tuple": (lambda loss, logits: (loss, logits), "output[0]", "output[1]"),
    "logits first": (lambda loss, logits: [logits, loss.view(1)], "output[1]", "output[0]"),
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, "output[loss]", "output[logits]"),
    "dataclass": (ModelOutput, "output[loss]", "output[logits]"),
    "mapping": (HuggingFacesOutput, "output[loss]", "output[logits]"),
    "loss": (lambda loss, logits: loss, "output", ""),
    "logits": (lambda loss, logits: logits, "", "output"),
}


class Model(nn.Module):
    def __init__(self, linear, loss, returned, factor=1.0) -> None:
        super().__init__()
        self.up, self.head = linear(HIDDEN, HIDDEN, bias=False), linear(HIDDEN, CLASSES, bias=False)
        self.loss, self.returned, self.factor = loss, returned, factor

    def forward(self, x: Tensor, labels: Tensor):
        logits = self.factor * self.head(F.silu(self.up(x)))
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return RETURNED[self.returned][0](self.loss(wide, labels), logits)


def cross_entropy(logits: Tensor, labels: Tensor, **arguments) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **arguments)


def shifted(logits: Tensor, labels: Tensor, **arguments) -> Tensor:
    return cross_entropy(logits[:, :-1], labels[:, 1:], **arguments)


def mean_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    losses = shifted(logits, labels, reduction="none").view(BATCH, -1)
    return (losses.sum(1) / (labels[:, 1:] != IGNORED).sum(1)).mean()


MISTAKES = {
    "labels not shifted": lambda logits, labels: cross_entropy(logits[:, :-1], labels[:, :-1]),
    "last label dropped": lambda logits, labels: shifted(logits[:, :-1], labels[:, :-1]),
    "mean of sequence means": mean_of_means,
    "ignored padding counted": lambda logits, labels: shifted(logits, labels, reduction="none").mean(),
    "label smoothing": lambda logits, labels: shifted(logits, labels, label_smoothing=0.1),
    "sum": lambda logits, labels: shifted(logits, labels, reduction="sum"),
}


def compared(returned, precision, reference=shifted, port=shifted, seed=0, **options) -> parity.Result:
    def inputs(rng, batch):
        labels = rng.integers(batch, SEQ, high=CLASSES)
        labels[0, 9:], labels[1, 3:7] = IGNORED, IGNORED
        return rng.normal(batch, SEQ, HIDDEN), labels

    def factory(te, **_):
        return parity.Pair(
            Model(nn.Linear, reference, returned),
            Model(te.Linear, port, returned, **options),
            inputs,
            weights={"up.weight": "up.weight", "head.weight": "head.weight"},
        )

    (result,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=BATCH),)), [precision], seeds=[seed])
    return result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_a_right_port_passes(precision, seed):
    for returned in ("tuple", "dataclass"):
        assert compared(returned, precision, seed=seed).status == "passed"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_loss_is_detected_beside_logits_as_by_the_loss_alone(mistake, precision):
    alone = compared("loss", precision, port=MISTAKES[mistake])
    assert alone.status == "failed"
    both = compared("tuple", precision, port=MISTAKES[mistake])
    assert both.status == "failed"
    assert both.margin == alone.margin
    assert both.worst.label in ("output[0]", "probed output[0]") or both.worst.label.endswith(" of output[0]")
    assert [finding.title for finding in both.findings] == [finding.title for finding in alone.findings]


@pytest.mark.parametrize("returned", ["logits first", "dict", "dataclass", "mapping"])
def test_however_they_are_returned(returned):
    _, loss, logits = RETURNED[returned]
    result = compared(returned, "bf16", port=MISTAKES["labels not shifted"])
    assert result.findings[0].title == "labels-shifted"
    failed = {tensor.label for tensor in result.tensors if not tensor.passed}
    assert {f"d up.weight of {loss}", f"d head.weight of {loss}", f"d x of {loss}"} <= failed
    assert not failed & {logits, f"d up.weight of {logits}", f"d head.weight of {logits}", f"d x of {logits}"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_part_is_judged_as_if_nothing_else_were_returned(reduction):
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return shifted(logits, labels, reduction=reduction)

    both = compared("dict", "bf16", loss, loss)
    margins = {tensor.label: tensor.margin for tensor in both.tensors}
    for alone in ("loss", "logits"):
        result = compared(alone, "bf16", loss, loss)
        of = f"output[{alone}]"
        expected = {
            f"{tensor.label} of {of}"
            if tensor.kind.endswith("gradient")
            else tensor.label.replace("output", of): tensor
            for tensor in result.tensors
        }
        assert {label: margins[label] for label in expected} == {label: x.margin for label, x in expected.items()}
        assert {f"d x of {of}", f"d up.weight of {of}", f"d head.weight of {of}", of, f"probed {of}"} == set(expected)


def test_a_mistake_in_front_of_both_is_told_once():
    result = compared("dict", "bf16", factor=2.0)
    assert len(result.findings) == 1
    assert {"d x of output[loss]", "d x of output[logits]"} <= {x.label for x in result.tensors if not x.passed}


def test_a_port_that_returns_no_loss_is_told_so():
    def factory(te, **_):
        return parity.Pair(
            Model(nn.Linear, shifted, "tuple"),
            Model(te.Linear, shifted, "logits"),
            lambda rng, batch: (rng.normal(batch, SEQ, HIDDEN), rng.integers(batch, SEQ, high=CLASSES)),
            weights={"up.weight": "up.weight", "head.weight": "head.weight"},
        )

    (result,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=BATCH),)), ["bf16"])
    assert result.status == "error"
    expected = "the candidate returns {'output': (4, 24, 48)} where the reference returns"
    assert expected in result.reason
    assert "'output[0]': (), 'output[1]': (4, 24, 48)" in result.reason


class PairedStep(nn.Module):
    """Logits and a number that is computed from them."""

    def __init__(self, linear, number) -> None:
        super().__init__()
        self.head, self.number = linear(HIDDEN, CLASSES, bias=False), number

    def forward(self, x: Tensor):
        logits = self.head(x)
        return {"logits": logits, "number": self.number(logits)}


@pytest.mark.parametrize(
    ("number", "is_apart"),
    [
        (lambda logits: logits.float().square().mean(), True),
        (lambda logits: (logits.argmax(-1) == 3).float().mean(), False),  # has no gradient
        (lambda logits: logits.mean(-1), False),  # not a single number
        (lambda logits: 0.0 * logits.sum(), False),  # holds nothing to compare
    ],
)
def test_what_no_loss_is_stays_with_the_others(number, is_apart):
    def factory(te, **_):
        return parity.Pair(
            PairedStep(nn.Linear, number),
            PairedStep(te.Linear, number),
            lambda rng, batch: rng.normal(batch, SEQ, HIDDEN),
            weights={"head.weight": "head.weight"},
        )

    (result,) = parity.compare(parity.Case("beside", factory, sizes=(dict(batch=BATCH),)), ["bf16"])
    assert result.status == "passed"
    gradients = {tensor.label for tensor in result.tensors if tensor.kind == "weight gradient"}
    assert ("d head.weight of output[number]" in gradients) is is_apart
    assert ("d head.weight" in gradients) is not is_apart


def test_two_losses_are_each_judged_by_themselves():
    class Two(Model):
        def forward(self, x: Tensor, labels: Tensor):
            logits = self.head(self.up(x)).float()
            return self.loss(logits, labels), 1e-4 * self.factor * logits.square().mean(), logits

    def factory(te, **_):
        return parity.Pair(
            Two(nn.Linear, shifted, ""),
            Two(te.Linear, shifted, "", factor=1.5),
            lambda rng, batch: (rng.normal(batch, SEQ, HIDDEN), rng.integers(batch, SEQ, high=CLASSES)),
            weights={"up.weight": "up.weight", "head.weight": "head.weight"},
        )

    (result,) = parity.compare(parity.Case("two", factory, sizes=(dict(batch=BATCH),)), ["bf16"])
    failed = {tensor.label for tensor in result.tensors if not tensor.passed and tensor.kind != "probed output"}
    assert failed == {"output[1]", "d x of output[1]", "d up.weight of output[1]", "d head.weight of output[1]"}


def hugging_faces_llama(te_linear=None):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    for parent in list(model.modules()) if te_linear else ():
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, te_linear(layer.in_features, layer.out_features, bias=False))
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_hugging_faces_model_with_labels(precision):
    """A correct port passes. One whose labels were shifted before the model shifts them again fails."""

    def factory(te, shifted_twice, **_):
        reference = hugging_faces_llama()

        def call(model, ids):
            return model(input_ids=ids, labels=ids)

        def call_candidate(model, ids):
            return model(input_ids=ids, labels=ids.roll(-1, 1) if shifted_twice else ids)

        return parity.Pair(
            reference,
            hugging_faces_llama(te.Linear),
            lambda rng, batch: rng.integers(batch, 16, high=96),
            {name: name for name, _ in reference.named_parameters()},
            call,
            call_candidate,
        )

    sizes = (dict(batch=2, shifted_twice=False), dict(batch=2, shifted_twice=True))
    results = parity.compare(parity.Case("llama", factory, sizes=sizes), [precision], diagnose=False)
    assert [result.status for result in results] == ["passed", "failed"]
    assert all("d lm_head.weight of output[loss]" in {x.label for x in result.tensors} for result in results)
    assert all(x.passed for result in results for x in result.tensors if x.label.endswith("output[logits]"))


# Subtle mistakes of modules that return a loss, identified by gradients and by the loss of probing inputs.


FFN = 256


class Loss(nn.Module):
    """Residual blocks, and the cosine similarity of their result with a target."""

    def __init__(self, *blocks: nn.Module, kind: str = "cosine", beside: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.kind, self.beside = nn.ModuleList(blocks), kind, beside

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = x + self.beside * torch.sin(7.0 * x) if self.beside else x
        if self.kind == "cosine":
            return F.cosine_similarity(x.float(), target.float(), dim=-1).mean().view(1)
        return F.cross_entropy(x.float().flatten(0, 1), target.argmax(-1).flatten()).view(1)


class MLP(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, eps=eps)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)), approximate=self.approximate))

    approximate = "tanh"


class ErfMLP(MLP):
    approximate = "none"


MAP = {
    "norm.weight": "layer_norm_weight",
    "norm.bias": "layer_norm_bias",
    "up.weight": "fc1_weight",
    "up.bias": "fc1_bias",
    "down.weight": "fc2_weight",
    "down.bias": "fc2_bias",
}


def result(
    blocks: list[type[MLP]], kind: str = "cosine", eps: float = 1e-5, beside: float = 0.0, seq: int = 64
) -> parity.Result:
    """Compare TE's MLPs, which have GELU by tanh, with these MLPs in FP32."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        ported = [te.LayerNormMLP(HIDDEN, FFN, activation="gelu", eps=eps) for _ in blocks]
        places = range(len(blocks))
        return parity.Pair(
            Loss(*(block() for block in blocks), kind=kind),
            Loss(*ported, kind=kind, beside=beside),
            lambda rng, batch, seq: (rng.normal(batch, seq, HIDDEN), rng.normal(batch, seq, HIDDEN)),
            weights={f"blocks.{i}.{mine}": f"blocks.{i}.{tes}" for i in places for mine, tes in MAP.items()},
        )

    (one,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=2, seq=seq),)), ["fp32"])
    return one


@pytest.mark.parametrize("blocks", [[ErfMLP, ErfMLP], [MLP, ErfMLP]])
def test_another_gelu_is_told(blocks):
    assert [finding.title for finding in result(blocks).findings] == ["activation"]


@pytest.mark.parametrize("kind", ["cosine", "cross-entropy"])
@pytest.mark.parametrize("eps", [1e-6, 1e-4, 1e-3])
def test_another_eps_is_told(eps, kind):
    (finding,) = result([MLP], kind, eps).findings
    assert finding.title == "norm-eps"
    assert f"eps={eps:g}" in finding.message


@pytest.mark.parametrize("kind", ["cosine", "cross-entropy"])
def test_a_mistake_that_is_not_known_is_told_as_none(kind):
    one = result([MLP, MLP], kind, beside=2e-3)
    assert one.status == "failed"
    assert {finding.code for finding in one.findings} <= {"PAR501", "PAR502"}
