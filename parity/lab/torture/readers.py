"""Hand damaged files to every reader: each reads them or says in a sentence what is wrong, and nothing else happens."""

from __future__ import annotations

import io
import itertools
import json
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

from parity import shown
from parity.case import files as of_pairs
from parity.conversion import checkpoint
from parity.conversion.plan import Made, Plan, Step
from parity.cpu.loading import loader
from parity.judge import limits, noise
from parity.lab import campaign, same
from parity.lab import record as lab_record
from parity.lab.gpu_report import limits as held_against
from parity.lab.kernel_table import table
from parity.lab.throughput import record as throughput
from parity.lab.torture import samples
from parity.lab.torture.mutations import mutated
from parity.machine.files import Claim
from parity.plugin import options, recorder
from parity.plugin.ending import Diary, Entry
from parity.report import changes, ci, earlier, failure, html, markdown, record
from parity.user_error import UserError

# What a page has of a record, apart from text.

_NO_PLOTS = "/* no plots */"
_DATA = [("type", "application/json"), ("id", "plots")]
_LINKS = {"data:,"}  # besides those to places of the page


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
        elif self._in_script is not None and data not in (_NO_PLOTS, html.script()):
            self.foreign.append("script")


_TAGS = re.compile(
    "html|head|meta|title|link|style|body|header|main|nav|section|div|p|span|a|b|i|code|pre|kbd|del|ins|h[1-5]|ul|li|"
    "dl|dt|dd|table|thead|tbody|tr|th|td|details|summary|figure|figcaption|form|label|input|select|option|output|"
    "button|script"
)


def foreign(page: str) -> Iterator[str]:
    """Yield what a page would run or fetch that is not its own, as no report shows it."""
    parsed = _Parsed()
    parsed.feed(page)
    parsed.close()
    yield from (f"<script of the record: {what}>" for what in parsed.foreign)
    if "<" in parsed.data or ">" in parsed.data:
        yield "<script data has tags>"
    json.loads(parsed.data, parse_constant=float.fromhex)  # which takes neither NaN nor Infinity of JavaScript


# Every place where parity reads what a file says; docs/reliability.md has this table, and a test compares the two.


@dataclass(frozen=True)
class Reader:
    """A reader with a file that it reads.

    Attributes:
        where: the function, as people would look for it.
        what: the file.
        sample: returns the file's content as parity writes it.
        read: reads the file, and returns texts that it shows.
        share: how many of all inputs it gets, relative to the others.
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
        yield shown.fence(["", line, ""]) + "\n"  # in a terminal a tag is a text
    for item in run.items:
        if item.bad:
            yield shown.fence(["", failure.message(item, details=True), ""]) + "\n"


def _page(file: Path) -> Iterator[str]:
    page = html.draw_with(_NO_PLOTS, markdown.digest(record.read(file)), file.stem)
    yield from foreign(page)
    yield page.replace("<script", "")  # those are its own, as nothing foreign was found


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
        whole.write_bytes(samples.run())
    for pair in ((whole, file), (file, whole)):
        before, now = map(record.read, pair)
        yield changes.draw(changes.Comparison(before, now, ("before", "now")))


def _resume(file: Path) -> Iterator[str]:
    recorder.left_by(file.read_bytes())
    claim = Claim(file)
    try:
        recorder.unfinished(claim, samples.OPTIONS)
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
    with suppress(UserError):  # it may share no law with the packaged one
        yield str(held_against.widest(file))


def _campaign(file: Path) -> Iterator[str]:
    jobs: campaign.Campaign[int, dict[str, float]] = campaign.Campaign(
        file, dict[str, float], lambda seed: {"seed": seed, "of": "x"}
    )
    found = jobs.finished(range(3))
    yield str(found)
    yield str(lab_record.outdated(file, {"torch": "3"}))
    jobs.keep(3, {"root": 3.0})
    assert repr(jobs.finished((*range(3), 3))) == repr({**found, 3: {"root": 3.0}})  # NaN is not itself
    lab_record.forget_outdated(file, {"torch": "2", "a": "b"})


def _throughput(file: Path) -> Iterator[str]:
    yield str(throughput.read(file))


def _kernels(file: Path) -> Iterator[str]:
    yield table.verdict(table.read_lines(file))


def _same(file: Path) -> Iterator[str]:
    whole = file.with_name("whole.jsonl")
    if not whole.exists():
        whole.write_bytes(samples.run())
    yield same.draw(same.compare(whole, file))


def _held_against(file: Path) -> Iterator[str]:
    found = held_against.read(file)
    yield held_against.draw(found, "emulated")


def _diary_of(folder: Path) -> bytes:
    line = record.result_line(samples.result("sound", 0))
    Diary(folder, "gw0").replace(Entry("pairs.py::x", line, record.environment_line(samples.ENVIRONMENT), 600.0))
    return (folder / "gw0.entry").read_bytes()


def _diary(file: Path) -> Iterator[str]:
    left = Diary(file.parent, file.stem).read_last()
    if left is not None:
        yield left[0].ended_by("a reason")


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
    made = [Step((Made(key, tuple(x.shape), x.dtype),), partial(dict, {key: x})) for key, x in tensors.items()]
    checkpoint.write(folder / "model.safetensors", Plan(steps=made))
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
    with suppress(KeyError):  # a law was lost; the packaged table, which alone is used, has all
        for kernels, precision, statistic in itertools.product(
            get_args(noise.Kernels), ("fp32", "bf16"), ("norm", "gain")
        ):
            assert noise.allowed(kernels, precision, statistic, 64, 100, table) > 0, kernels
    yield ""


def _runs_of(folder: Path) -> bytes:
    for name in ("reports/runs/parity-0007", "reports/runs/parity-x", ".parity/baselines/good"):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(samples.run())
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
    Reader("`report.record.read`, `parity report`", "a run's record", lambda _: samples.run(), _report, 6),
    Reader("`report.html`, `parity report -o x.html`", "a run's record", lambda _: samples.run(), _page, 2),
    Reader("`report.ci`, GitHub and JUnit", "a run's record", lambda _: samples.run(), _ci, 2),
    Reader("`report.changes`, `--against`", "two records", lambda _: samples.run(), _against, 3),
    Reader("`plugin.recorder`, `--resume`", "a record to go on with", lambda _: samples.run(), _resume, 3),
    Reader("`judge.limits.load`, `--calibration`", "a table of limits", samples.table, _limits, 3),
    Reader("`lab.record`, `lab.campaign`", "a record of a study or the zoo", samples.campaign, _campaign, 3),
    Reader("`lab.throughput.record.read`", "a record of `parity throughput`", samples.throughputs, _throughput),
    Reader("`lab.kernel_table.table`", "a record of `parity kernels`", lambda _: samples.kernels(), _kernels),
    Reader("`lab.same`, `parity lab same`", "two records", lambda _: samples.run(), _same, 2),
    Reader("`lab.gpu_report.limits`", "a run's record", lambda _: samples.run(), _held_against),
    Reader("`plugin.ending.Diary`", "what a worker notes before it compares", _diary_of, _diary),
    Reader("`cpu.loading.loader`", "a compiled module of TE in the cache", _cache_of, _cache),
    Reader("`conversion.checkpoint.read`", "a file of safetensors", _checkpoint_of, _checkpoint),
    Reader("`conversion.checkpoint.read`, its index", "an index of a checkpoint's files", _index_of, _index),
    Reader("`conversion.checkpoint.read`, `torch.load`", "a file of `torch.save`", _torch_of, _torch),
    Reader("`judge.noise`", "the table of what kernels differ by", lambda _: noise.PACKAGED.read_bytes(), _noise),
    Reader("`report.baselines.find`, `parity report 7`", "a baseline's name, or a run's", _runs_of, _runs),
    Reader("`case.files.imports_parity`", "a Python file", lambda _: samples.pairs(), _pairs),
    Reader("`plugin.options.parse_*`", "an option's value", lambda _: b"0,3,7-9", _arguments),
)


# What becomes of an input.


@dataclass
class Outcome:
    """Hold what a reader did with its inputs.

    Attributes:
        reader: which.
        inputs: how many it got.
        read: how many it took, whole or without the lines that it left out.
        refused: how many it refused in a sentence.
        wrong: what else happened, with the number of inputs of each kind and the first one's seed.
    """

    reader: Reader
    inputs: int = 0
    read: int = 0
    refused: int = 0
    wrong: dict[str, tuple[int, int]] = field(default_factory=dict)


_DRAWING = (_report, _page, _ci, _against, _held_against)  # who shows names and messages of the file
SECONDS = 5.0  # of processor time for one input
# What no report shows: control characters anywhere, tags outside of code.
_UNSEEN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")
_TAG = re.compile("<script")
_BLOCK = re.compile(r"^(`{3,})text\n.*?^\1$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")
# What a program does that runs what it reads. Modules are imported when they are first needed, which compiles nothing
# of a file that is read; so the first inputs of a reader, which are whole, are not watched.
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
    """Hand so many mutated inputs to the readers; the same ones for the same seed."""
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
    """Return an empty text for an input that was read, ``refused``, or what went wrong."""
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
