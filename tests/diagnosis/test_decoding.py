"""Ports that decode token by token after a prompt, with mistakes in the cache, the positions or the mask, and the
first wrong token. Log-probabilities of tokens, as a trainer compares them with those of its engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import in_turn, tells
from torch import Tensor, nn

import parity
from lab.corpus import decoder

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, FFN, BATCH, SEQ, PROMPT = 96, 64, 4, 16, 128, 4, 16, 8
FREQUENCIES = 1e4 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
Cache = dict[nn.Module, tuple[Tensor, Tensor]]  # holds its modules, so that no new one gets the id of a deleted one


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return decoder.turned(x, FREQUENCIES, positions)


class Layer(nn.Module):
    """A layer that sees a whole sequence, or the next tokens of a sequence whose keys and values are cached."""

    def __init__(self, linear: Any, norm: Any, window: int = 0, cap: float = math.inf) -> None:
        super().__init__()
        self.window, self.cap = window, cap
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)
        with torch.no_grad():
            for one in (self.q, self.k):
                one.weight.mul_(3.0)  # makes queries tell keys apart

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float = 1.0) -> Tensor:
        scores = q @ k.mT * (scale / math.sqrt(HEAD_DIM))
        if math.isfinite(self.cap):
            scores = self.cap * torch.tanh(scores / self.cap)
        context = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self.norm1(x)
        return tuple(one(normed).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for one in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        hidden = place > place[:, None]
        if self.window:
            hidden = hidden | (place < place[:, None] - self.window)
        return self.attend(x, turned(q, place), turned(k, place), v, hidden)

    def step(self, x: Tensor, start: int, cache: Cache, wrong: dict[str, Any]) -> Tensor:
        q, k, v = self.heads(x)
        new = x.shape[1]
        decodes, positions = start > 0, start + torch.arange(new)
        if decodes and "position" in wrong:
            positions = wrong["position"](positions)
        plain, q, k = k, turned(q, positions), turned(k, positions)
        old = cache.get(self)
        keys = k if old is None else torch.cat((old[0], k), 2)
        values = v if old is None else torch.cat((old[1], v), 2)
        kept = plain if wrong.get("unrotated") else k
        cache[self] = (kept if old is None else torch.cat((old[0], kept), 2)), values
        if old is not None and wrong.get("not kept"):
            cache[self] = old
        if old is not None and wrong.get("behind"):
            keys, values = old
        query, key = torch.arange(new) + keys.shape[2] - new, torch.arange(keys.shape[2])
        hidden = key > query[:, None]
        window = wrong.get("window", self.window) if decodes else self.window
        if window:
            hidden = hidden | (key < query[:, None] - window)
        if decodes and wrong.get("top left"):
            hidden = key > torch.arange(new)[:, None]
        if not decodes and wrong.get("unmasked prompt"):
            hidden = torch.zeros_like(hidden)
        if decodes and "slots" in wrong:
            empty = wrong["slots"] - keys.shape[2]
            keys, values = (F.pad(one, (0, 0, 0, empty)) for one in (keys, values))
            hidden = F.pad(hidden, (0, empty), value=False)
        return self.attend(x, q, keys, values, hidden, wrong.get("scale", 1.0) if decodes else 1.0)


class Model(nn.Module):
    """Returns the log-probability of each next token or, if the inputs are activations, the result of the last norm."""

    def __init__(self, linear: Any, norm: Any, has_ids: bool, layers: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN) if has_ids else nn.Identity()
        self.layers = nn.ModuleList(Layer(linear, norm, **options) for _ in range(layers))
        self.norm, self.head = norm(HIDDEN), linear(HIDDEN, VOCABULARY, bias=False) if has_ids else nn.Identity()
        self.has_ids = has_ids

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        y = self.head(self.norm(y))
        return log_probs(y[:, :-1], x[:, 1:]) if self.has_ids else y

    def decoded(self, x: Tensor, wrong: dict[str, Any], cache: Cache, start: int = 0) -> Tensor:
        parts = []
        for part in x.split([PROMPT] + [1] * (SEQ - PROMPT), 1):
            y = self.embed(part)
            for layer in self.layers:
                y = layer.step(y, start, cache, wrong)
            parts.append(self.head(self.norm(y)))
            start += part.shape[1]
        return torch.cat(parts, 1)


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def compared(
    wrong: dict[str, Any],
    has_ids: bool = False,
    precision: str = "bf16",
    ends: Callable[[Tensor, Tensor], Tensor] = lambda logits, ids: log_probs(logits[:, :-1], ids[:, 1:]),
    decode: Callable[[Model, Tensor], Tensor] | None = None,
    layers: int = 1,
    stages: bool = False,
    pair: dict[str, Any] | None = None,
    **options: Any,
) -> parity.Result:
    """Compare a model with a port that decodes wrongly, or that computes something else from its logits."""

    def call_candidate(model: Model, x: Tensor) -> Tensor:
        y = model.decoded(x, wrong, {}) if decode is None else decode(model, x)
        return ends(y, x) if has_ids else y

    def factory(te: Any) -> parity.Pair:
        plain = Model(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), has_ids, layers, options)
        return parity.Pair(
            plain,
            Model(te.Linear, te.RMSNorm, has_ids, layers, options),
            weights={name: name for name, _ in plain.named_parameters()},
            inputs=lambda rng: rng.integers(BATCH, SEQ, high=VOCABULARY) if has_ids else rng.normal(BATCH, SEQ, HIDDEN),
            call_candidate=call_candidate,
            evaluation=True,
            **(pair or {}),
        )

    return parity.compare(parity.Case("decoder", factory, sizes=({},)), [precision], stages=stages)[0]


WRONG = [
    ({"position": torch.zeros_like}, {}, "rope-position", "from position 8 on each new token is rotated as the first"),
    ({"position": lambda p: p - PROMPT}, {}, "rope-position", "from position 8 on new tokens are rotated by positions"),
    ({"position": lambda p: p + 1}, {}, "rope-position", "from position 8 on rotary positions are one too large"),
    ({"position": lambda p: p - 1}, {}, "rope-position", "from position 8 on rotary positions are one too small"),
    (
        {"position": lambda p: p.clamp(max=7)},
        {},
        "rope-position",
        "from position 8 on rotary positions stay at the last",
    ),
    ({"not kept": True}, {}, "cache-step", "from position 8 on a token sees only the first 8 and itself"),
    ({"behind": True}, {}, "cache-step", "from position 8 on a new token does not see its own key"),
    ({"slots": 32}, {}, "cache-step", "from position 8 on empty slots of a cache of 32 are seen"),
    ({"unrotated": True}, {}, "cached-before-rope", "from position 8 on keys in the cache are not rotated"),
    ({"top left": True}, {}, "mask-corner", "from position 8 on each new token sees the first key alone"),
    ({"unmasked prompt": True}, {}, "mask", "in the port, all of its 8 tokens see each other"),
    ({"window": 0}, {"window": 4}, "window", "in the port, it sees all, in positions 8 to 15 of 16"),
    ({"window": 3}, {"window": 4}, "window", "it sees 3, in positions 8 to 15 of 16"),
    ({"scale": 4.0}, {}, "softmax-scale", "the port's is 1 (missing), in positions 8 to 15 of 16"),
]


@in_turn(("wrong", "options", "title", "phrase"), WRONG)
def test_what_goes_wrong_in_decoding_is_told_with_the_token_since_which_it_does(
    wrong, options, title, phrase, precision
):
    result = compared(wrong, precision=precision, **options)
    tells(result, title, phrase)


@pytest.mark.parametrize(("wrong", "title"), [(WRONG[2][0], "rope-position"), (WRONG[5][0], "cache-step")])
def test_log_probabilities_show_what_goes_wrong_in_decoding_as_well(wrong, title):
    result = compared(wrong, has_ids=True)
    tells(result, title, "from position 8 on")
    first = 9 if "not kept" in wrong else 8  # the first token itself still sees all it should
    assert any(f"output is right before position {first} (of 15, counted from 0)" in note for note in result.notes)


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_right_decoding_passes(has_ids, precision):
    assert compared({}, has_ids, precision).passed


def test_a_cache_that_is_not_emptied_between_sequences_of_a_batch_is_told():
    def one_after_another(model: Model, ids: Tensor) -> Tensor:
        cache: Cache = {}
        rows = (model.decoded(row[None], {}, cache, SEQ * i) for i, row in enumerate(ids))
        return torch.cat(list(rows))

    result = compared({}, has_ids=True, decode=one_after_another)
    tells(result, "cache-not-reset", "a sequence also sees the tokens of those before it in the batch")


def test_a_cache_that_is_kept_from_call_to_call_is_told():
    cache: Cache = {}

    def with_one_cache(model: Model, x: Tensor) -> Tensor:
        return model.decoded(x, {}, cache)

    tells(compared({}, decode=with_one_cache), "state-between-calls")


def test_positions_that_count_the_padding_of_shorter_prompts_are_told_with_their_rows():
    prompts = torch.tensor([8, 5, 8, 6])

    def decode(model: Model, x: Tensor) -> Tensor:
        rows = []
        for row, prompt in zip(x, prompts.tolist(), strict=True):
            cache: Cache = {}
            parts, start = [], 0
            wrong = {"position": lambda positions, late=8 - prompt: positions + late}
            for part in row[None].split([prompt] + [1] * (SEQ - prompt), 1):
                y = part
                for layer in model.layers:
                    y = layer.step(y, start, cache, wrong)
                parts.append(model.norm(y))
                start += part.shape[1]
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows)

    tells(compared({}, decode=decode), "rope-position", "in rows 1, 3 of the batch, whose prompts are shorter")


# Log-probabilities of tokens.


def late(logits: Tensor, ids: Tensor) -> Tensor:
    return log_probs(torch.cat((logits[:, :1], logits[:, :-2]), 1), ids[:, 1:])


def in_bf16(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].bfloat16().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].float()


def by_logsumexp_in_bf16(logits: Tensor, ids: Tensor) -> Tensor:
    logits = logits[:, :-1].bfloat16()
    return (logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)).float()


@in_turn(
    ("ends", "title", "phrase"),
    [
        (late, "labels-shifted", "each label meets the logits of the position before its own"),
        (lambda logits, ids: log_probs(logits[:, :-1], ids[:, :-1]), "labels-shifted", "meet the label before theirs"),
        (lambda logits, ids: log_probs(logits[:, :-1] / 0.7, ids[:, 1:]), "temperature", "a temperature of 0.7"),
        (lambda logits, ids: log_probs(logits[:, :-1] / 1.3, ids[:, 1:]), "temperature", "a temperature of 1.3"),
        (in_bf16, "log-softmax-precision", "each number of output can be held in bfloat16"),
        (by_logsumexp_in_bf16, "log-softmax-precision", "each number of output can be held in bfloat16"),
    ],
)
def test_what_is_made_of_logits_is_told(ends, title, phrase, precision):
    tells(compared({}, has_ids=True, precision=precision, ends=ends), title, phrase)


def test_a_passing_comparison_says_how_far_log_probabilities_are_off_and_what_rounding_makes():
    result = compared({}, has_ids=True)
    (note,) = result.notes
    assert note.startswith("log-probabilities of output are off by ")
    for phrase in ("on average (by rounding alone, ", "ratios of probabilities are", "; KL "):
        assert phrase in note


def test_log_probabilities_in_16_bits_are_noted_with_what_that_costs():
    def narrow(logits: Tensor, ids: Tensor) -> Tensor:
        return log_probs(logits[:, :-1], ids[:, 1:]).bfloat16()

    result = compared({}, has_ids=True, ends=narrow)
    assert result.passed
    assert any("returning them in bfloat16 instead of FP32 alone makes" in note for note in result.notes)


def test_the_first_wrong_one_of_scores_with_one_dimension_is_told():
    def ends(logits: Tensor, ids: Tensor) -> Tensor:
        right = log_probs(logits[:, :-1], ids[:, 1:]).flatten()
        return torch.cat((right[:37], right[37:] - 0.5))

    reference = {"call_reference": lambda model, x: model(x).flatten()}
    result = compared({}, has_ids=True, decode=lambda model, x: model.decoded(x, {}, {}), ends=ends, pair=reference)
    assert result.status == "failed", result.reason
    assert any("right before index 37 of dimension 0 (of 60" in note for note in result.notes), result.notes


def test_the_place_of_a_decoder_that_nothing_explains_is_told():
    noise = 0.3 * torch.randn(FFN, generator=torch.Generator().manual_seed(0))

    def with_noise(model: Model, x: Tensor) -> Tensor:
        hook = model.layers[1].up.register_forward_hook(
            lambda one, args, result: result + (noise * result.abs()).to(result)
        )
        with hook:
            return model.decoded(x, {}, {})

    result = compared({}, decode=with_noise, layers=2)
    assert result.status == "failed", result.reason
    told = {finding.title: finding.message for finding in result.findings}
    # The noise is added after the hook that sees the result of ``up``.
    assert told["first-divergence"].startswith(
        "the candidate departs from the reference after the 1st 'linear' of layers.1.up: it computes what the reference"
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_no_stage_of_a_right_decoder_is_off(precision):
    """Its tables of angles are cast once they are joined, and each holds the rows of one step."""
    result = compared({}, precision=precision, layers=2, stages=True)
    assert result.status == "passed", result.reason
