"""Ask kernels how they read operands and add products: ``python -m parity.measuring.gpu_report.facts BACKEND REPORT``.

The documentation does not say what a GEMM does to its operands and sums (``parity.numerics.kernel_choices``). So each
question is asked as a product whose result gives the answer: a row of numbers between two of TF32, a large term beside
a small one, integers whose sums FP32 holds exactly. TransformerEngine's own ``general_gemm`` is asked, and PyTorch's
products, which unfused attention and plain modules use.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from parity import te
from parity.numerics.formats import tf32, tf32_truncated
from parity.report import environment
from parity.report.numbers import markdown_table
from parity.shown import one_line
from parity.te import Kernels


@dataclass(frozen=True)
class Fact:
    """The answer of one kernel to one question.

    Attributes:
        question: what was asked.
        kernel: the kernel that computed the product, with the formats.
        shape: tokens, inner and outer size, such as ``16 x 512 x 16``.
        answer: in words.
    """

    question: str
    kernel: str
    shape: str
    answer: str


# Returns ``[tokens, outer]`` in FP32 or a 16-bit dtype from inputs ``[tokens, inner]`` and weights ``[outer, inner]``.
Product = Callable[[Tensor, Tensor], Tensor]

READ = "How are FP32 operands read?"
KEPT = "How many fraction bits of the largest term does a sum keep?"
ALIGNED = "How many fraction bits of the largest term do the others keep in its instruction?"
ROUNDED = "How is a sum rounded that has more bits than it keeps?"
STEP = "How many products does one instruction add?"
PROMOTED = "After how many products does a sum in FP32 take over?"
PARTS = "Are partial sums over K rounded to the result's dtype?"

_SHAPES = ((16, 64), (128, 128), (256, 1024), (4096, 4096))  # tokens, outer: different kernels compute them
_INNER = 512
_LONG_SUMS = ((16, 4096, 64), (64, 16384, 64), (128, 8192, 1024), (512, 4096, 512), (2048, 14336, 4096))
_TF32_STEP = 2.0**-10  # between two numbers of TF32 from 1 to 2


def facts(kernels: Kernels, shapes: Sequence[tuple[int, int]] | None = None) -> Iterator[Fact]:
    """Yield the answers one after the other. If a kernel refuses a question, its error is the answer.

    Args:
        kernels: the kernels that are asked.
        shapes: tokens and outer sizes; by default all on a GPU, and the small ones on a CPU, where others tell no more.
    """
    asker, is_cpu = _Asker(kernels.device), kernels.backend == "cpu"
    shapes = shapes or (_SHAPES[:2] if is_cpu else _SHAPES)
    long_sums = _LONG_SUMS[:1] if is_cpu else _LONG_SUMS
    for tokens, outer in shapes:
        for layout in ("TN", "NN", "NT"):
            yield asker.ask(
                READ, f"TE, {layout}", asker.gemm(torch.float32, layout), (tokens, _INNER, outer), _probe_reading
            )
        yield asker.ask(READ, "PyTorch, TF32 allowed", _with_tf32, (tokens, _INNER, outer), _probe_reading)
    for name, product in asker.products().items():
        for tokens, outer in shapes:
            shape = (tokens, _INNER, outer)
            kept = asker.ask(KEPT, name, product, shape, _told_kept)
            yield kept
            if kept.answer[0].isdigit():
                bits = int(kept.answer.split()[0])
                yield asker.ask(ROUNDED, name, product, shape, partial(_probe_rounding, bits=bits))
                aligned = asker.ask(ALIGNED, name, product, shape, _aligned_bits)
                yield aligned
                if aligned.answer.isdigit():
                    yield asker.ask(
                        STEP, name, product, shape, partial(_probe_instruction_size, bits=int(aligned.answer))
                    )
                if name.startswith("FP8"):
                    yield asker.ask(PROMOTED, name, product, shape, partial(_probe_promotion, bits=bits))
    for name, product in asker.sixteen_bit_products().items():
        for shape in long_sums:
            yield asker.ask(PARTS, name, product, shape, partial(_in_parts, largest=2 if "FP8" in name else 15))


def operands_read(kernels: Kernels, layout: str, shape: tuple[int, int, int]) -> str:
    """Return how TE's GEMM reads FP32 operands, in words. The shape consists of tokens, inner and outer size."""
    return _probe_reading(_Asker(kernels.device).gemm(torch.float32, layout), shape, kernels.device)


@dataclass(frozen=True)
class _Asker:
    """Compute products on a device and put questions to them."""

    device: torch.device

    def ask(
        self,
        question: str,
        kernel: str,
        product: Product,
        shape: tuple[int, int, int],
        answer: Callable[[Product, tuple[int, int, int], torch.device], str],
    ) -> Fact:
        text = " x ".join(map(str, shape))
        try:
            return Fact(question, kernel, text, answer(product, shape, self.device))
        except Exception as error:  # a kernel may refuse a shape, a layout or a format
            return Fact(question, kernel, text, f"error: {one_line(error)}")

    def products(self) -> dict[str, Product]:
        """Return every kind of product whose sums are of interest, with results in FP32."""
        return {
            "TE, FP32 operands": self.gemm(torch.float32),
            "TE, BF16 operands": self.gemm(torch.bfloat16, result=torch.float32),
            "TE, FP16 operands": self.gemm(torch.float16, result=torch.float32),
            "FP8, TE, no split accumulator": self.fp8_gemm(split=False),
            "FP8, TE, split accumulator": self.fp8_gemm(split=True),
            "FP8, TE, a scale a block": self.block_gemm(),
        }

    def sixteen_bit_products(self) -> dict[str, Product]:
        """Return the products with 16-bit results."""
        found: dict[str, Product] = {}
        for name, dtype in {"BF16": torch.bfloat16, "FP16": torch.float16}.items():
            for layout in ("TN", "NN", "NT"):
                found[f"TE, {name}, {layout}"] = self.gemm(dtype, layout, dtype)
            found[f"PyTorch, {name}, matmul"] = partial(_compute_matmul, dtype=dtype)
            found[f"PyTorch, {name}, bmm of 4"] = partial(_compute_bmm, dtype=dtype)
        for split in (False, True):
            name = f"TE, FP8 to BF16, {'' if split else 'no '}split accumulator"
            found[name] = self.fp8_gemm(split, torch.bfloat16)
        return found

    def gemm(self, dtype: torch.dtype, layout: str = "TN", result: torch.dtype = torch.float32) -> Product:
        """Return TE's GEMM of operands in a dtype. The layout says which of them are transposed in memory."""

        def multiply(inputs: Tensor, weights: Tensor) -> Tensor:
            a = weights.to(dtype) if layout[0] == "T" else weights.to(dtype).t().contiguous()
            b = inputs.to(dtype) if layout[1] == "N" else inputs.to(dtype).t().contiguous()
            return _general_gemm(a, b, out_dtype=result, layout=layout, grad=layout != "TN")

        return multiply

    def fp8_gemm(self, split: bool, result: torch.dtype = torch.float32) -> Product:
        """Return TE's GEMM of E4M3 operands that have the scale 1."""
        quantize = self._make_quantizer()

        def multiply(inputs: Tensor, weights: Tensor) -> Tensor:
            return _general_gemm(
                quantize(weights), quantize(inputs), out_dtype=result, layout="TN", use_split_accumulator=split
            )

        return multiply

    def block_gemm(self) -> Product:
        """Return TE's GEMM of E4M3 operands with scales for blocks of 1 by 128 inputs and 128 by 128 weights."""
        pytorch = importlib.import_module("transformer_engine.pytorch")
        codes = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3

        def quantize(x: Tensor, dimensions: int) -> Tensor:
            quantizer = pytorch.Float8BlockQuantizer(codes, rowwise=True, columnwise=True, block_scaling_dim=dimensions)
            result: Tensor = quantizer(x)
            return result

        return lambda inputs, weights: _general_gemm(
            *(quantize(weights, 2), quantize(inputs, 1)),
            out_dtype=torch.float32,
            layout="TN",
            use_split_accumulator=True,
        )

    def _make_quantizer(self) -> Callable[[Tensor], Tensor]:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        codes = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3
        one = torch.ones(1, device=self.device)
        return lambda x: pytorch.Float8Quantizer(scale=one, amax=torch.zeros_like(one), fp8_dtype=codes)(x)


def _general_gemm(a: Tensor, b: Tensor, **options: object) -> Tensor:
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    result: Tensor = extensions.general_gemm(a, b, **options)[0]
    return result


def _compute_matmul(inputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) @ weights.to(dtype).t()


def _compute_bmm(inputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the same product four times in one batch, as attention does for its heads."""
    return torch.bmm(inputs.to(dtype).repeat(4, 1, 1), weights.to(dtype).t().repeat(4, 1, 1))[0]


def _with_tf32(inputs: Tensor, weights: Tensor) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return inputs @ weights.t()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# The questions. Each takes a product, its shape and the device, and returns the answer.


def _probe_reading(product: Product, shape: tuple[int, int, int], device: torch.device) -> str:
    """Multiply numbers between two neighbours in TF32 by 1, as inputs and as weights, and see what is left of them."""
    tokens, inner, outer = shape
    eighths = torch.arange(17, dtype=torch.float64) / 8
    numbers = (1 + eighths * _TF32_STEP).repeat(2)
    numbers[17:] *= -1
    answers = []
    for as_inputs in (True, False):
        rows = tokens if as_inputs else outer
        given = numbers[torch.arange(rows) % len(numbers)].float()
        operand = torch.zeros(rows, inner)
        operand[:, 3] = given
        ones = torch.zeros(outer if as_inputs else tokens, inner)
        ones[:, 3] = 1
        operand, ones = operand.to(device), ones.to(device)
        result = product(operand, ones)[:, 0] if as_inputs else product(ones, operand)[0]
        answers.append(_name_of_rounding(given, result.cpu()))
    inputs, weights = answers
    return inputs if inputs == weights else f"inputs: {inputs}; weights: {weights}"


def _name_of_rounding(given: Tensor, result: Tensor) -> str:
    step = torch.tensor(_TF32_STEP, dtype=torch.float64)
    away = (given.double() / step).abs().add(0.5).floor().mul(step).copysign(given.double())
    known = {
        "as FP32": given.double(),
        "cut to TF32, toward zero": tf32_truncated(given).double(),
        "rounded to TF32, ties to even": tf32(given).double(),
        "rounded to TF32, ties away from zero": away,
    }
    matching = [name for name, expected in known.items() if torch.equal(expected, result.double())]
    return matching[0] if matching else "neither FP32 nor one of TF32's roundings"


# Sums of a large term, 2^16, and small ones. FP8 numbers (E4M3) range from 2^-9 to 2^8, so that a term may be 34 bits
# below the large one if the weights of all but the first two places are small as well.
_LARGE, _RANGE = 16, 33


def _sum_rows(product: Product, shape: tuple[int, int, int], device: torch.device, rows: Tensor, bits: int) -> Tensor:
    """Return the sum of each row of terms, FP64. Each product adds as many rows as there are tokens.

    Args:
        rows: ``[rows, inner]``, the terms, in units of the large one.
        bits: how many bits the smallest term lies below the large one.
    """
    tokens, inner, outer = shape
    weight = torch.full((inner,), 2.0**8 if bits <= _LARGE else 2.0**-9)
    weight[:2] = 2.0**8
    inputs = (rows.double() * 2.0**_LARGE / weight).float()
    sums = []
    for part in inputs.split(tokens):
        padded = torch.zeros(tokens, inner)
        padded[: len(part)] = part
        sums.append(
            product(padded.to(device), weight.expand(outer, inner).contiguous().to(device))[: len(part), 0].cpu()
        )
    return torch.cat(sums).double() / 2.0**_LARGE


def _kept_bits(product: Product, shape: tuple[int, int, int], device: torch.device) -> tuple[int, int]:
    """Add ever smaller terms to a large one, in its own instruction (place 2) and in the last, until they are lost."""
    inner, found = shape[1], []
    for place in (2, inner - 1):
        kept = 0
        for bits in range(1, 30):
            row = torch.zeros(1, inner)
            row[0, 0], row[0, place] = 1.0, 2.0**-bits
            if _sum_rows(product, shape, device, row, bits).item() == 1.0:
                break
            kept = bits
        found.append(kept)
    return found[0], found[1]


def _told_kept(product: Product, shape: tuple[int, int, int], device: torch.device) -> str:
    near, far = _kept_bits(product, shape, device)
    return str(near) if near == far else f"{near} within an instruction, {far} across instructions"


def _probe_rounding(product: Product, shape: tuple[int, int, int], device: torch.device, bits: int) -> str:
    """Add three quarters of the last bit kept to a large term, in its own instruction and in the last one."""
    inner = shape[1]
    rows = torch.zeros(2, inner)
    rows[:, 0] = 1.0
    rows[0, 2] = rows[1, inner - 1] = 0.75 * 2.0**-bits
    near, far = ((_sum_rows(product, shape, device, rows, bits + 2) - 1.0) * 2.0**bits).tolist()
    return f"{_describe_direction(near)}; across instructions {_describe_direction(far)}"


def _describe_direction(units: float) -> str:
    return {0.0: "toward zero", 1.0: "to nearest"}.get(units, f"to {units:g} units for 0.75")


def _aligned_bits(product: Product, shape: tuple[int, int, int], device: torch.device) -> str:
    """Add ever smaller terms to a large one and its negative, until nothing is left of them."""
    for bits in range(1, _RANGE + 1):
        row = torch.zeros(1, shape[1])
        row[0, :3] = torch.tensor([1.0, -1.0, 2.0**-bits])
        if not _sum_rows(product, shape, device, row, bits).item():
            return str(bits - 1)
    return f"all of {_RANGE}"


def _probe_instruction_size(product: Product, shape: tuple[int, int, int], device: torch.device, bits: int) -> str:
    """Find where a small term survives beside a large one and its negative, since there another instruction adds it."""
    inner = shape[1]
    rows = torch.zeros(inner - 2, inner)
    rows[:, 0], rows[:, 1] = 1.0, -1.0
    rows[torch.arange(inner - 2), torch.arange(2, inner)] = 2.0 ** -(bits + 1)
    return _first_that_shows(_sum_rows(product, shape, device, rows, bits + 1))


def _probe_promotion(product: Product, shape: tuple[int, int, int], device: torch.device, bits: int) -> str:
    """Move a small term away from a large one. Where it survives, it is added to a sum without the large one."""
    inner = shape[1]
    rows = torch.zeros(inner - 2, inner)
    rows[:, 0] = 1.0
    rows[torch.arange(inner - 2), torch.arange(2, inner)] = 2.0 ** -(bits + 2)
    return _first_that_shows(_sum_rows(product, shape, device, rows, bits + 2) - 1.0)


def _first_that_shows(sums: Tensor) -> str:
    """Return the index of the first term that survives, counted from 2, and say so if not all after it survive."""
    shown = (sums != 0).nonzero().flatten()
    if not len(shown):
        return "none shows: more than all"
    first = int(shown[0])
    if len(shown) == len(sums) - first:
        return "each shows" if first == 0 else str(first + 2)
    spans = [int(index) + 2 for index in shown[:6]]
    return f"from {first + 2} on, with gaps: {', '.join(map(str, spans))}, ..."


def _in_parts(product: Product, shape: tuple[int, int, int], device: torch.device, largest: int) -> str:
    """Multiply integers whose sums FP32 holds exactly, and count the results that are not rounded just once."""
    tokens, inner, outer = shape
    generator = torch.Generator().manual_seed(sum(shape))
    # Both signs, so that the sums fit FP16, and those of integers up to 2 fit the 14 bits that FP8 products keep.
    inputs, weights = (
        torch.randint(-largest, largest + 1, (rows, inner), generator=generator).float().to(device)
        for rows in (tokens, outer)
    )
    result = product(inputs, weights)
    exact = inputs.double() @ weights.double().t()
    wrong = (result != exact.to(result.dtype)).double().mean().item()
    if not wrong:
        return "no: each result is rounded once"
    worst = ((result.double() - exact).abs() / exact.abs().clamp(min=1)).max().item() / torch.finfo(result.dtype).eps
    return f"{100 * wrong:.3g} % of the results are off, by up to {worst:.2g} of eps"


def read(file: Path) -> list[Fact]:
    """Return the facts of a record."""
    return [Fact(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def verdict(found: Sequence[Fact]) -> str:
    """Return how TE's kernels read FP32 operands, and what sums of FP8 products keep, in one sentence."""
    told = []
    for question, kernel, words in (
        (READ, "TE, TN", "FP32 operands are"),
        (KEPT, "FP8, TE, no split accumulator", "bits that a sum of FP8 products keeps:"),
        (PROMOTED, "FP8, TE, split accumulator", "products until FP32 takes over:"),
    ):
        answers = dict.fromkeys(fact.answer for fact in found if (fact.question, fact.kernel) == (question, kernel))
        if answers:
            told.append(f"{words} {' or '.join(answers)}")
    return "; ".join(told) or "no kernel answered"


def draw(found: Sequence[Fact], kernels: str) -> str:
    """Return the report, markdown. Facts that differ only in their shapes share a row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for fact in found:
        alike.setdefault((fact.question, fact.kernel, fact.answer), []).append(fact.shape)
    parts = ["# How kernels read operands and add products", f"Kernels: **{kernels}**.", __doc__.split("\n\n", 1)[1]]
    for question in dict.fromkeys(fact.question for fact in found):
        rows = [(key[1], key[2], ", ".join(shapes)) for key, shapes in alike.items() if key[0] == question]
        parts += [f"## {question}", markdown_table(rows, ("kernel", "answer", "tokens x inner x outer"))]
    return "\n\n".join(parts) + "\n"


def _write_report(backend: str, report: str, part: str = "all") -> int:
    kernels = te.kernels("gpu" if backend == "gpu" else "cpu")
    path = Path(report)
    found: list[Fact] = []
    described = environment.measure(kernels.backend, [0], 1).kernels
    shapes = {"small": _SHAPES[:1], "all": None}[part]
    try:
        with path.with_suffix(".jsonl").open("w", encoding="utf-8") as lines:
            for fact in facts(kernels, shapes):
                found.append(fact)
                print(json.dumps(asdict(fact)), file=lines, flush=True)
    finally:  # the report is wanted even if time runs out
        path.write_text(draw(found, described), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_write_report(*sys.argv[1:]))
