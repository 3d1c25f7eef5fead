"""Give every reader damaged files. It must read them or say in one sentence what is wrong, and do nothing else.

See docs/reliability.md.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import torch

from lab import same
from parity import shown
from parity.case import files as of_pairs
from parity.judge import limits, noise
from parity.judge.limits import Difference, OfPrecision
from parity.machine.files import Claim
from parity.measuring import record as lab_record
from parity.measuring.gpu_report import limits as held_against
from parity.measuring.kernel_table import table
from parity.measuring.throughput import record as throughput
from parity.plugin import options, recorder
from parity.plugin.options import Options
from parity.report import changes, ci, earlier, failure, html, markdown, record
from parity.report.earlier import PARITY, Asked, code_of_parity
from parity.report.environment import Environment
from parity.report.record import Uncollected
from parity.result import Check, Determinism, Errors, Finding, Histogram, Picture, Profile, Result, Step, TensorResult
from parity.user_error import UserError
from parity.weights.conversion import checkpoint, plan
from te_on_cpu.loading import loader

# Damage as disks, interruptions, editors and attackers cause it: to bytes, lines and JSON values.


# The values that replace others. The texts would move a cursor, begin a tag, end a row or a block, or run as code.

HOSTILE = "\x1b[2J\x07<script>alert(1)</script>\r\n| `x` ``` __import__('os').system('touch executed')"
_RAW = "\x00raw\x00"  # marks a string that is written as raw JSON, which Python's json module would not write
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1e308, 5e-324, 2**63, -(2**63), "", "nan", "inf", "1", [], {}, [[]], [None], {"": 0}),
    *(HOSTILE, "\ud800", "\u202e", "\x00", "x" * 10_000, {"float": "nan"}, {"float": "inf"}, {"float": 1}),
    *(f"{_RAW}{text}" for text in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 300, "9" * 5_000)),
    *(f"{_RAW}{'[' * depth}{']' * depth}" for depth in (50, 100_000)),
)


def mutated(sample: bytes, draw: random.Random) -> bytes:
    """Return the sample, damaged one to three times."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        sample = draw.choice(_KINDS)(sample, draw)
    return sample


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 64)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _delete(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + data[begin + draw.choice((1, 10, 1_000)) :]


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    not_utf8 = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", draw.randbytes(16))
    texts = (b"\x00", b"\x00" * 4096, b"\n", b"\r\n", b"{", b"]", b'"', b"\\u0000", HOSTILE.encode())
    return data[:at] + draw.choice((*not_utf8, *texts)) + data[at:]


def _lines(data: bytes, draw: random.Random) -> bytes:
    """Delete, repeat or swap lines."""
    lines = data.splitlines(keepends=True)
    if lines:
        here, there = draw.randrange(len(lines)), draw.randrange(len(lines))
        kind = draw.randrange(3)
        if kind == 0:
            del lines[here]
        elif kind == 1:
            lines.insert(there, lines[here])
        else:
            lines[here], lines[there] = lines[there], lines[here]
    return b"".join(lines)


def _value(data: bytes, draw: random.Random) -> bytes:
    """Replace, remove or rename a value in a line of JSON, or in the whole file if that is JSON."""
    parts = data.splitlines()
    index = draw.randrange(len(parts)) if parts else 0
    for text, put in (
        (parts[index] if parts else b"", lambda new: b"\n".join([*parts[:index], new, *parts[index + 1 :]]) + b"\n"),
        (data, lambda new: new),
    ):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return put(_written(_changed(content, draw)))
    return _flip(data, draw)


def _changed(content: Any, draw: random.Random) -> Any:
    """Change one value somewhere in the content, more often near its leaves than near its root."""
    if not isinstance(content, (dict, list)) or not content or draw.random() < 0.1:
        return draw.choice(_VALUES)
    keys = list(content) if isinstance(content, dict) else range(len(content))
    key = draw.choice(keys)
    kind = draw.random()
    if kind < 0.05:
        del content[key]
    elif kind < 0.1 and isinstance(content, dict):
        content[draw.choice(("", "x", HOSTILE, *map(str, keys)))] = content.pop(key)
    else:
        content[key] = _changed(content[key], draw)
    return content


def _written(content: Any) -> bytes:
    text = json.dumps(content)
    mark = json.dumps(_RAW)[:-1]
    while mark in text:
        before, _, rest = text.partition(mark)
        raw, _, after = rest.partition('"')
        text = before + raw + after
    return text.encode()


_KINDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flip, _truncate, _delete, _insert, _lines, _value, _value, _value, _value),
)


# A sample file for each reader, as parity writes it, with an example of everything that may be in such a file.


_OPTIONS = Options(None, "cpu", (0, 1), Path(), "run")
_DIFFERENCE = Difference("output", "norm", 3.5, 1.7)
_ENVIRONMENT = Environment(
    **{field.name: "x" for field in dataclasses.fields(Environment) if field.type == "str"},
    seeds=(0, 1),
    items=3,
    limits_compared=(OfPrecision("bf16", 24, 23, 0, _DIFFERENCE, _DIFFERENCE, 1, "accepted"),),
    asked=Asked(_OPTIONS.as_asked, "00000000", {PARITY: code_of_parity(), "pairs.py": "00000000"}),
    threads=2,
)


def _sample_result(case: str, seed: int, margin: float = 0.4, **fields: object) -> Result:
    """Return a result with three tensors, which passed if the margin is at most 1."""
    errors = Errors(3e-3, 1e-2, 1.7, 0.9999, 50.0, 1.0)
    checks = (Check("norm", 1.0, 1.8, "row"),)
    profiles = tuple(Profile(axis, 16, (1e-3, 2e-3), (1e-3, 1e-3), (0, 3)) for axis in (0, 1))
    picture = Picture(1e-3, profiles, Histogram(-1.0, 0.5, (60, 65), (125, 0), (3, 3)))
    tensor = TensorResult("output", "output", (2, 64), errors, errors, 4e-3, 2e-2, margin, checks, picture=picture)
    weights = (
        dataclasses.replace(tensor, name=f"layers.{i}.q_proj.weight", kind="weight gradient", margin=margin / 2)
        for i in range(2)
    )
    swapped = Finding("PAR101", "gate-up-swapped", "halves are exchanged", repair="pass x=1; it has x=2")
    complete = Result(
        case=case,
        precision="bf16",
        size={"batch": 2},
        size_label="2",
        seed=seed,
        backend="cpu",
        status="passed" if margin <= 1 else "failed",
        tensors=(tensor, *weights),
        findings=() if margin <= 1 else (swapped,),
        notes=("a note",),
        path="pairs.py",
        attention="FusedAttention",
        determinism=Determinism(("output",), "a kernel"),
    )
    return dataclasses.replace(complete, **fields)  # type: ignore[arg-type]


def _sample_run() -> bytes:
    """Return the record of a run with a pass, a failure, a skip, and a pair that was not collected."""
    results = [
        *(_sample_result("sound", seed) for seed in (0, 1)),
        *(_sample_result("fails", seed, margin=math.inf) for seed in (0, 1)),
        _sample_result("trains", 0, steps=(Step(1, 5.0, 5.0, 0.4), Step(2, 4.0, 4.1, 0.5))),
        _sample_result("skips", 0, status="skipped", reason="no FP8", tensors=()),
    ]
    lines = [record.environment_line(_ENVIRONMENT), record.uncollected_line(Uncollected("pairs.py::x", "it misfits"))]
    return record.data("".join([*lines, *map(record.result_line, results)]))


def _sample_table(folder: Path) -> bytes:
    """Return a table of limits that holds a part of the packaged one."""
    packaged = limits.packaged()
    laws = dict(sorted(packaged.laws.items())[:8])
    file = folder / "table.json"
    limits.save(limits.Table(laws, {"bf16": {"accepted": "", "cases": ["mlp"]}}), file)
    return file.read_bytes()


def _sample_campaign(folder: Path) -> bytes:
    """Return the record of a campaign, such as studies, the zoo and the count of false alarms keep."""
    file = folder / "campaign.jsonl"
    for seed in range(3):
        lab_record.append(file, {"seed": seed, "of": "x"}, {"root": seed, "of": 0.5 * seed}, {"torch": "2", "a": "b"})
    return file.read_bytes()


def _sample_throughputs(folder: Path) -> bytes:
    """Return the record of ``parity throughput``."""
    file = folder / "throughput.jsonl"
    spread = throughput.Spread(1e-3, 0.9e-3, 1.1e-3)
    state = throughput.GpuState(1980.0, 2619.0, 41.0, 300.0)
    row = throughput.Row(
        workload="mlp",
        size="batch 1",
        implementation="eager",
        precision="bf16",
        peak_format="bf16",
        flops_forward=10,
        flops_backward=20,
        times=throughput.Times(spread, spread, 5),
        memory=3 << 30,
        error=2e-3,
        before=state,
        after=state,
    )
    for content in (_ENVIRONMENT, throughput.Peak("bf16", 8e14, 8192), row):
        throughput.append(file, content)
    return file.read_bytes()


def _sample_kernels() -> bytes:
    """Return the record of ``parity kernels``."""
    named = {"family": "Norms", "kernel": "rmsnorm_fwd", "variant": "BF16", "shapes": "8x64", "result": "z"}
    figures = {"elements": 8, "different": 3, "max_ulps": 1, "relative": 0.02, "gpu_seconds": 1e-5, "why_none": None}
    lines = [{"environment": {}, "emulated_gpu": "x"}, {**named, **figures}, {**named, "why_none": "too old"}]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _sample_pairs() -> bytes:
    """Return a file of pairs."""
    return b'import parity\n\n\n@parity.pair("x", sizes=[dict(n=2)])\ndef x(te, n): ...\n'


# The parts of a page, apart from text, that may come from a record.

_NO_PLOTS = "/* no plots */"
_DATA = [("type", "application/json"), ("id", "plots")]
_LINKS = {"data:,"}  # besides links within the page


class _Parsed(HTMLParser):
    """Collects what a browser might run or fetch, and the data for the page's script."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.data = ""
        self._in_script: list[tuple[str, str | None]] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = attrs if tag == "script" else None
        for name, value in attrs:
            fetches = name in ("href", "src", "action", "srcset") and not (value or "").startswith("#")
            if name.startswith("on") or (fetches and value not in _LINKS):
                self.foreign.append(f"{tag} {name}")
        if not _TAGS.fullmatch(tag):
            self.foreign.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = None

    def handle_data(self, data: str) -> None:
        if self._in_script == _DATA:
            self.data += data
        elif self._in_script is not None and data != html.script():
            self.foreign.append("script")


_TAGS = re.compile(
    "html|head|meta|title|link|style|body|header|main|nav|section|div|p|span|a|b|i|code|pre|kbd|del|ins|h[1-5]|ul|li|"
    "dl|dt|dd|table|thead|tbody|tr|th|td|details|summary|figure|figcaption|form|label|input|select|option|output|"
    "button|script|template"
)


def foreign(page: str) -> Iterator[str]:
    """Yield what a page would run or fetch that parity did not put there, in words that contain ``<script``."""
    parsed = _Parsed()
    parsed.feed(page)
    parsed.close()
    yield from (f"<script of the record: {what}>" for what in parsed.foreign)
    if "<" in parsed.data or ">" in parsed.data:
        yield "<script data has tags>"
    json.loads(parsed.data, parse_constant=float.fromhex)  # raises for JavaScript's NaN and Infinity


# Every place where parity reads a file. docs/reliability.md has the same table, and a test compares the two.


@dataclass(frozen=True)
class Reader:
    """A reader and the kind of file that it reads.

    Attributes:
        where: the function, named as people would look for it.
        what: the kind of file.
        sample: returns the file's content as parity writes it.
        read: reads the file and yields the texts that parity would show.
        share: its share of all inputs, relative to the other readers.
    """

    where: str
    what: str
    sample: Callable[[Path], bytes]
    read: Callable[[Path], Iterator[str]]
    share: int = 1


def _report(file: Path) -> Iterator[str]:
    run = markdown.digest(record.read(file))
    yield markdown.draw(run, file.stem)
    for line in failure.lines(run.notes):
        yield shown.fence(["", line, ""]) + "\n"  # fenced because a tag does no harm in a terminal
    for item in run.items:
        if item.bad:
            yield shown.fence(["", failure.message(item, details=True), ""]) + "\n"


def _page(file: Path) -> Iterator[str]:
    page = html.draw_with(_NO_PLOTS, markdown.digest(record.read(file)), file.stem)
    yield from foreign(page)
    yield page.replace("<script", "")  # these are the page's own: foreign ones have been reported already


def _ci(file: Path) -> Iterator[str]:
    run = markdown.digest(record.read(file))
    yield ci.summary(run, file.stem)
    for item in run.items:
        told = ci.annotation(ci.Place(item.worst.path, 1), item.name, failure.message(item) if item.bad else item.name)
        command, _, message = told.removeprefix("::error file=").partition("::")
        if told.count("\n") or command.count(",") != 2 or not message:
            yield f"<script of a command: {told}>"
        yield shown.fence(["", told, ""]) + "\n"
        yield shown.fence(["", *(f"{name}={shown.text(value)}" for name, value in ci.properties(item.results))]) + "\n"


def _against(file: Path) -> Iterator[str]:
    whole = file.with_name("whole.jsonl")
    if not whole.exists():
        whole.write_bytes(_sample_run())
    for pair in ((whole, file), (file, whole)):
        before, now = map(record.read, pair)
        yield changes.draw(changes.Comparison(before, now, ("before", "now")))


def _resume(file: Path) -> Iterator[str]:
    recorder.left_by(file.read_bytes())
    claim = Claim(file)
    try:
        recorder.unfinished(claim, _OPTIONS)
    finally:
        claim.close()
    yield ""


def _limits(file: Path) -> Iterator[str]:
    limits.load.cache_clear()
    read = limits.load(file)
    for key, law in read.laws.items():
        limit = read.limit(*key)
        assert 0 < limit < 1e6, (law, limit)
    limits.compared(read)
    with suppress(UserError):  # the table may share no law with the packaged one
        yield str(held_against.widest(file))


def _campaign(file: Path) -> Iterator[str]:
    jobs: lab_record.Campaign[int, dict[str, float]] = lab_record.Campaign(
        file, dict[str, float], lambda seed: {"seed": seed, "of": "x"}
    )
    found = jobs.finished(range(3))
    yield str(found)
    yield str(lab_record.outdated(file, {"torch": "3"}))
    jobs.keep(3, {"root": 3.0})
    assert repr(jobs.finished((*range(3), 3))) == repr({**found, 3: {"root": 3.0}})  # NaN does not equal itself
    lab_record.forget_outdated(file, {"torch": "2", "a": "b"})


def _throughput(file: Path) -> Iterator[str]:
    yield str(throughput.read(file))


def _kernels(file: Path) -> Iterator[str]:
    yield table.verdict(table.read_lines(file))


def _same(file: Path) -> Iterator[str]:
    whole = file.with_name("whole.jsonl")
    if not whole.exists():
        whole.write_bytes(_sample_run())
    yield same.draw(same.compare(whole, file))


def _held_against(file: Path) -> Iterator[str]:
    found = held_against.read(file)
    yield held_against.draw(found, "emulated")


_CACHED = "x = 1\n"


def _cache_of(folder: Path) -> bytes:
    key, code = b"k" * 32, compile(_CACHED, "x", "exec")
    return loader.entry_of(key, code)


def _cache(file: Path) -> Iterator[str]:
    code = loader.read_cached(file, b"k" * 32)
    assert code is None or code.co_code == compile(_CACHED, "x", "exec").co_code
    yield ""


def _pairs(file: Path) -> Iterator[str]:
    of_pairs.imports_parity(file)
    yield ""


def _checkpoint_of(folder: Path) -> bytes:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    made = [
        plan.Step((plan.Made(key, tuple(x.shape), x.dtype),), partial(dict, {key: x})) for key, x in tensors.items()
    ]
    checkpoint.write(folder / "model.safetensors", plan.Plan(steps=made))
    return (folder / "model.safetensors").read_bytes()


def _index_of(folder: Path) -> bytes:
    _checkpoint_of(folder)
    return json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}).encode()


def _checkpoint(file: Path) -> Iterator[str]:
    named = file.with_name("damaged.safetensors")
    named.write_bytes(file.read_bytes())
    yield from map(str, checkpoint.read(named))


def _index(file: Path) -> Iterator[str]:
    named = file.with_name("damaged.index.json")
    named.write_bytes(file.read_bytes())
    yield from map(str, checkpoint.read(named))


def _torch_of(folder: Path) -> bytes:
    torch.save({"model": {"a": torch.arange(3.0), "b": torch.ones(2, 2)}, "step": 7}, folder / "model.pt")
    return (folder / "model.pt").read_bytes()


def _torch(file: Path) -> Iterator[str]:
    named = file.with_name("damaged.pt")
    named.write_bytes(file.read_bytes())
    yield from map(str, checkpoint.read(named, within="model"))


def _noise(file: Path) -> Iterator[str]:
    limits.load.cache_clear()
    table = limits.load(file)
    with suppress(KeyError):  # the damage removed a law; parity only ever uses the packaged table, which has them all
        for kernels, precision, statistic in itertools.product(
            get_args(noise.Kernels), ("fp32", "bf16"), ("norm", "gain")
        ):
            assert noise.allowed(kernels, precision, statistic, 64, 100, table) > 0, kernels
    yield ""


def _runs_of(folder: Path) -> bytes:
    for name in ("reports/runs/parity-0007", "reports/runs/parity-x", ".parity/baselines/good"):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_sample_run())
    (folder / "reports/runs/parity-0008.jsonl").mkdir()
    (folder / "reports/runs/parity-0009.jsonl").symlink_to("parity-0009.jsonl")
    return b"parity-7"


def _runs(file: Path) -> Iterator[str]:
    text = file.read_bytes().decode(errors="surrogateescape")
    assert earlier.numbers(file.parent / "reports" / earlier.RUNS, "parity") == [7, 8, 9]
    try:
        yield str(len(record.read(earlier.find(text, file.parent, "--against")).results))
    except UserError as error:
        yield str(error)


def _arguments(file: Path) -> Iterator[str]:
    text = file.read_bytes().decode(errors="surrogateescape")
    for parse in (options.parse_seeds, options.parse_timeout, options.parse_precisions, options.parse_diagnosis):
        try:
            parse(text)
        except UserError as error:
            yield str(error)


READERS = (
    Reader("`report.record.read`, `parity report`", "a run's record", lambda _: _sample_run(), _report, 6),
    Reader("`report.html`, `parity report -o x.html`", "a run's record", lambda _: _sample_run(), _page, 2),
    Reader("`report.ci`, GitHub and JUnit", "a run's record", lambda _: _sample_run(), _ci, 2),
    Reader("`report.changes`, `--against`", "two records", lambda _: _sample_run(), _against, 3),
    Reader("`plugin.recorder`, `--resume`", "a record to go on with", lambda _: _sample_run(), _resume, 3),
    Reader("`judge.limits.load`, `--calibration`", "a table of limits", _sample_table, _limits, 3),
    Reader("`measuring.record`", "a record of a study or the zoo", _sample_campaign, _campaign, 3),
    Reader("`measuring.throughput.record.read`", "a record of `parity throughput`", _sample_throughputs, _throughput),
    Reader("`measuring.kernel_table.table`", "a record of `parity kernels`", lambda _: _sample_kernels(), _kernels),
    Reader("`lab.same`, `python -m lab same`", "two records", lambda _: _sample_run(), _same, 2),
    Reader("`measuring.gpu_report.limits`", "a run's record", lambda _: _sample_run(), _held_against),
    Reader("`te_on_cpu.loading.loader`", "a compiled module of TE in the cache", _cache_of, _cache),
    Reader("`weights.conversion.checkpoint.read`", "a file of safetensors", _checkpoint_of, _checkpoint),
    Reader("`weights.conversion.checkpoint.read`, its index", "an index of a checkpoint's files", _index_of, _index),
    Reader("`weights.conversion.checkpoint.read`, `torch.load`", "a file of `torch.save`", _torch_of, _torch),
    Reader("`judge.noise`", "the table of what kernels differ by", lambda _: noise.PACKAGED.read_bytes(), _noise),
    Reader("`report.baselines.find`, `parity report 7`", "a baseline's name, or a run's", _runs_of, _runs),
    Reader("`case.files.imports_parity`", "a Python file", lambda _: _sample_pairs(), _pairs),
    Reader("`plugin.options.parse_*`", "an option's value", lambda _: b"0,3,7-9", _arguments),
)


# Running the readers on damaged inputs.


@dataclass
class Outcome:
    """Count what a reader did with its inputs.

    Attributes:
        reader: the reader.
        inputs: how many it got.
        read: how many it read, completely or without the lines that it left out.
        refused: how many it refused with a sentence.
        wrong: what else happened, each with how many inputs caused it and the number of the first of them.
    """

    reader: Reader
    inputs: int = 0
    read: int = 0
    refused: int = 0
    wrong: dict[str, tuple[int, int]] = field(default_factory=dict)


_DRAWING = (_report, _page, _ci, _against, _held_against)  # these show names and messages from the file
SECONDS = 5.0  # of processor time for one input
# What no report may show: control characters anywhere, tags outside of code.
_UNSEEN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")
_TAG = re.compile("<script")
_BLOCK = re.compile(r"^(`{3,})text\n.*?^\1$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")
# Audit events of a program that runs what it reads. A reader's first inputs, which are undamaged, are not watched,
# because modules are imported when they are first needed, and that raises such events, too.
_EVENTS = ("exec", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen")
_watching: Counter[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is not None and event in _EVENTS:
        _watching[event] += 1


@cache
def _install_audit() -> None:
    """Add the hook once, since a process never gets rid of one."""
    sys.addaudithook(_audit)


class HangError(Exception):
    """Raised in a reader that takes too long."""


def _hangs(number: int, frame: FrameType | None) -> None:
    raise HangError


def run(inputs: int, seed: int = 0) -> list[Outcome]:
    """Give the readers this many damaged inputs in all, the same ones for the same seed."""
    shares = sum(reader.share for reader in READERS)
    before = signal.signal(signal.SIGVTALRM, _hangs)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [
                _outcome(each, inputs * each.share // shares, seed, Path(folder) / str(i))
                for i, each in enumerate(READERS)
            ]
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _outcome(reader: Reader, inputs: int, seed: int, folder: Path) -> Outcome:
    folder.mkdir()
    sample = reader.sample(folder)
    outcome = Outcome(reader)
    file = folder / "gw0.entry"
    for _ in range(2):
        file.write_bytes(sample)
        list(reader.read(file))
    for number in range(inputs):
        file.write_bytes(mutated(sample, random.Random(f"{seed} {reader.where} {number}")))
        outcome.inputs += 1
        what = _one(reader, file)
        if what == "":
            outcome.read += 1
        elif what == "refused":
            outcome.refused += 1
        else:
            count, first = outcome.wrong.get(what, (0, number))
            outcome.wrong[what] = (count + 1, first)
    return outcome


def _one(reader: Reader, file: Path) -> str:
    """Return an empty text if the input was read, ``refused`` if it was refused, or else what went wrong."""
    global _watching
    _install_audit()
    events: Counter[str] = Counter()
    _watching = events
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with redirect_stderr(io.StringIO()):
            output = "".join(reader.read(file))
        verdict = ""
    except UserError as error:
        output, verdict = str(error), "refused"
        if "\n" in output or (str(file.parent) not in output and "record" not in output):
            return f"a message that does not say where: {output[:80]!r}"
    except HangError:
        return f"took more than {SECONDS:g} s"
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:60]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _watching = None
    if events:
        return f"did {json.dumps(dict(events))}"
    found = _UNSEEN.search(output) or _TAG.search(output if reader.read is _page else _outside_of_code(output))
    return f"showed {found[0]!r}" if found and reader.read in _DRAWING else verdict


def _outside_of_code(markdown: str) -> str:
    return _SPAN.sub("", _BLOCK.sub("", markdown))
