"""Read the options of a run, from the command line or pytest's ini file, and find out where this process works."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from parity.machine import devices
from parity.plugin import engines
from parity.plugin.scan import has_cases
from parity.report import earlier
from parity.settings import LONGEST, MOST_STEPS, check_precisions, default_seconds, of_project, seconds_of
from parity.user_error import UserError

# The workplace of one process of a run: its device, its share of the device's memory, and the way to the controller.


KEY = "parity"
FINISHED = "parity-finished"  # ids of the items that the resumed run had finished


@dataclass(frozen=True)
class Workplace:
    """A process's place in the run.

    Attributes:
        worker: xdist's name of the worker; empty for a run without workers.
        folder: the folder that the run's workers share; None without workers, or if it cannot be reached.
        device: the device's identifier, or ``cpu``.
        share: how many bytes of the device's memory each of its workers has; None if that is unknown or all of them.
        workers: how many workers the run has.
        channel: execnet's, by which a worker says what it knows; None without workers.
    """

    worker: str = ""
    folder: Path | None = None
    device: str = "cpu"
    share: int | None = None
    workers: int = 1
    channel: Any = None

    @property
    def stacks(self) -> Path | None:
        """The file for a worker's stacks in case it runs too long and cannot even report that."""
        return self.folder / f"{self.worker}.stacks" if self.folder else None

    @property
    def lock(self) -> Path | None:
        """The device's lock file; none on Windows, which has no such lock."""
        if self.folder is None or sys.platform == "win32":
            return None
        return self.folder / f"device-{self.device.replace('/', '-')}"


def of(config: pytest.Config) -> Workplace:
    """Return this process's workplace, as the controller described it."""
    given = getattr(config, "workerinput", {})
    if KEY not in given:
        return Workplace(worker=given.get("workerid", ""))
    told = given[KEY]
    folder = Path(told["folder"])
    shared = folder if folder.is_dir() else None
    return Workplace(given["workerid"], shared, told["device"], told["share"], devices.workers(), told["channel"])


# Check that files can be written to their places, before hours of work and not after them.


def check_folder(folder: Path, option: str) -> None:
    """Make sure that files can be put into the folder, which need not exist yet; leave nothing behind.

    Args:
        folder: the folder for the files.
        option: the option by which the user names it, for the message.

    Raises:
        UserError: if it is a file or is below one, or if it cannot be created or written to.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        below = "" if existing == folder else f", which is below {existing}"
        raise UserError(f"{option} is {folder}{below}: that is a file, but should be a folder")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".parity-", dir=existing))
    except OSError as error:
        raise UserError(f"{option} is {folder}, but {existing} cannot be written to: {_explain_error(error)}") from None


def check_file(file: Path, option: str) -> None:
    """Make sure that the file can be written, whether it exists already or not.

    Args:
        file: the file to be written; its folder need not exist yet.
        option: the option by which the user names it, or its folder, for the message.

    Raises:
        UserError: as for ``check_folder``, and if its place is taken by a folder or a protected file, or if no file can
            have its name.
    """
    check_folder(file.absolute().parent, option)
    try:
        file.lstat()
    except FileNotFoundError:
        return
    except OSError as error:  # for example because the name is too long
        raise UserError(f"{option}: {file} cannot be written: {error.strerror}") from None
    if file.is_dir():
        raise UserError(f"{option}: {file} is a folder, but should be a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{option}: {file} is write-protected")


def _explain_error(error: OSError) -> str:
    # If no file can be made at all, as in /proc, Linux says that the new one does not exist.
    return "no file can be made there" if isinstance(error, FileNotFoundError) else str(error.strerror)


# The plugin's options, from the command line or pytest's ini file.


BACKENDS = ("auto", "gpu", "cpu")
SIZES = ("auto", "small", "large")
CI = ("junit", "summary", "annotations")
PARITY_BACKEND = "PARITY_BACKEND"
_DIGITS_OF_COUNTS = 8
_LONGEST_NAME = 100
_MOST_SEEDS = 1_000_000
_LAST_SEED = 2**63 - 1  # the largest seed that PyTorch's generators take


@dataclass(frozen=True)
class Options:
    """The options of a run, all valid.

    Attributes:
        precisions: names from ``parity.te``; None for all of them.
        backend: which kernels run: TransformerEngine's own on a GPU, or the CPU kernels.
        seeds: the seeds of every comparison, in this order.
        folder: where the record and the report go.
        name: the name of both files, without their endings.
        calibration: the table of limits; None for the packaged one.
        attention: the attention backend that TransformerEngine has to take, or ``all`` for each in turn; ``auto`` lets
            TransformerEngine choose, except for cases that demand particular backends.
        sizes: one of ``SIZES``: whether cases are compared at their large sizes as well; ``auto`` means on a GPU.
        determinism: whether each candidate is built and run again, to see whether it gives the same bytes.
        stages: whether a port that passes is judged stage by stage as well.
        unwritten: whether each candidate is run again with memory full of NaN, and garbage in its inputs' padding.
        probe_weights: whether a fresh model that passes is compared with probing weights as well.
        timeout: seconds that one comparison, an item at one seed, may take; 0 for no limit.
        diagnosis: seconds that the search for the cause of a failure may take; 0 for no limit, None for no search.
        resume: whether the run goes on with the existing record.
        steps: for how many steps every pair is trained, 0 for none; None for the steps that each pair declares.
        training: whether pairs that declare no steps are trained as well.
        decoding: whether candidates that take a cache are compared as they decode as well.
        engine: what compares the items: ``local`` for this machine, or the name of an engine, such as ``ray``.
        address: the cluster's address; empty for the cluster that Ray finds.
        save_as: the name under which the record is kept as a baseline; empty for none.
        against: the baseline or the record with which the run is compared at its end; empty for none.
        start: the folder where pytest was started; baselines are kept below it.
        keep_runs: how many earlier runs of the same name are kept.
        ci: the kinds of output for a CI system, a subset of ``CI``.
        strict: whether an item that is skipped, or whose comparison proves nothing, is an error.
        json: the file for the verdicts as one JSON document; None for none.
    """

    precisions: tuple[str, ...] | None
    backend: Literal["auto", "gpu", "cpu"]
    seeds: tuple[int, ...]
    folder: Path
    name: str
    calibration: Path | None = None
    attention: str = "auto"
    sizes: str = "auto"
    determinism: bool = False
    stages: bool = False
    unwritten: bool = True
    probe_weights: bool = False
    timeout: float = 600.0
    diagnosis: float | None = 30.0
    resume: bool = False
    steps: int | None = None
    training: bool = False
    decoding: bool = False
    engine: str = engines.LOCAL
    address: str = ""
    save_as: str = ""
    against: str = ""
    start: Path = Path()
    keep_runs: int = 20
    ci: frozenset[str] = frozenset()
    strict: bool = False
    json: Path | None = None

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.name}.md"

    @property
    def page(self) -> Path:
        return self.folder / f"{self.name}.html"

    @property
    def as_asked(self) -> dict[str, str]:
        """Return the values of the options that results depend on. Seeds and limits are in the record anyway."""
        return {
            "--parity-precisions": ",".join(self.precisions or ()) or "all",
            "--parity-attention": self.attention,
            "--parity-determinism": "yes" if self.determinism else "no",
            "--parity-stages": "yes" if self.stages else "",
            "--parity-unwritten": "" if self.unwritten else "no",
            "--parity-probe-weights": "yes" if self.probe_weights else "",
            "--parity-diagnosis": "no" if self.diagnosis is None else f"{self.diagnosis:g}",
            "--parity-strict": "yes" if self.strict else "",
            "--parity-calibration": self.calibration.name if self.calibration else "",
        }


# Each option's name, default, form and help.
_DECLARED = (
    ("precisions", "", "P,P", "compare at these precisions only, e.g. fp32,bf16 (default: all)"),
    ("backend", "auto", "auto|gpu|cpu", "TransformerEngine's real kernels, or emulated ones (default: auto)"),
    ("seeds", "1", "N|S,S", "20 means seeds 0 to 19; 0,3,7 or 5-9 list them; 3, or 0 means only this one"),
    ("report", "reports", "DIR", "folder of the report and its JSON lines (default: reports)"),
    ("name", "parity", "NAME", "the report's name (default: parity)"),
    ("attention", "auto", "BACKEND", "TransformerEngine's attention: auto, flash, fused, unfused, or all in turn"),
    ("sizes", "auto", "auto|small|large", "compare pairs at their large sizes as well (default: on a GPU)"),
    ("determinism", "no", "yes|no", "run each candidate again; the report says where bytes differ (default: no)"),
    (
        "stages",
        "no",
        "yes|no",
        "judge what passes stage by stage as well, which shows what a model hides (default: no)",
    ),
    (
        "unwritten",
        "yes",
        "yes|no",
        "run each candidate again, all memory that it allocates full of NaN (default: yes)",
    ),
    ("probe-weights", "no", "yes|no", "compare fresh models with probing weights as well (default: no)"),
    ("steps", "", "N", "train every pair for so many steps, 0 for none (default: what each pair declares)"),
    ("training", "no", "yes|no", "train pairs that declare no steps as well, for 3 (default: no)"),
    ("decoding", "no", "yes|no", "let candidates that take a cache decode as well (default: no)"),
    ("calibration", "", "FILE", "a table of limits from 'parity calibrate' (default: the packaged one)"),
    ("timeout", "600", "SECONDS", "for an item at one seed, and to collect a file; 0: no limit (default: 600)"),
    ("diagnosis", "yes", "yes|no|SECONDS", "seconds for the cause of a failure, 0 for no limit (default: 30)"),
    ("resume", "no", "yes|no", "resume a run that did not finish, from its record (default: no)"),
    ("save-as", "", "NAME", "keep the record as the baseline NAME, for --parity-against"),
    ("against", "", "NAME|RECORD", "tell what has changed since a baseline; fails if something regressed"),
    ("keep-runs", "20", "N", "how many earlier runs of the same name are kept in DIR/runs (default: 20)"),
    ("ci", "all", "all|none|P,P", "output for CI systems: junit, summary, annotations (default: all)"),
    ("strict", "no", "yes|no", "items that are skipped, or whose comparison proves nothing, are errors (default: no)"),
    ("json", "", "FILE", "write the verdicts as one JSON document, see docs/commands.md (default: none)"),
    ("engine", "local", "local|ray|NAME", "compare here, on a Ray cluster, or by an installed engine (default: local)"),
    (
        "address",
        "",
        "ADDRESS",
        "address of the Ray cluster; local starts one (default: RAY_ADDRESS, or the one that runs here)",
    ),
)
OF_PROJECT = (*(name for name, *_ in _DECLARED), "workers")
"""The options that ``[tool.parity]`` may have; ``workers`` is for ``parity run``."""


def declare(parser: pytest.Parser) -> None:
    """Declare the options to pytest. Each is also an ini value, such as ``parity_seeds`` for ``--parity-seeds``."""
    group = parser.getgroup("parity", "parity: PyTorch against TransformerEngine")
    for name, default, metavar, text in _DECLARED:
        if name == "strict":  # a flag that may have a value, but does not take the next argument for it
            for end, value in (("", "yes"), ("=yes", "yes"), ("=no", "no")):
                group.addoption(
                    f"--parity-strict{end}", dest="parity_strict", action="store_const", const=value, help=text
                )
        else:
            group.addoption(f"--parity-{name}", dest=f"parity_{name}", default=None, metavar=metavar, help=text)
        parser.addini(f"parity_{name}", f"the same as --parity-{name}", default=default)


def apply_project(config: pytest.Config) -> None:
    """Take the project's defaults of options that the command line leaves out.

    Raises:
        UserError: if one is not an option, or has a value of another type.
    """
    if not has_cases(config):
        return
    start = config.invocation_params.dir
    paths = [start / argument.split("::")[0] for argument in config.args]
    for name, value in of_project(paths, start, OF_PROJECT).items():
        option = f"parity_{name}"
        if getattr(config.option, option, "") is None and not (name == "backend" and os.environ.get(PARITY_BACKEND)):
            setattr(config.option, option, value)


def read(config: pytest.Config) -> Options:
    """Return the options of a run. ``PARITY_BACKEND`` takes precedence over an ini file, but not the command line.

    A relative report folder is relative to where pytest was started or, if it is from an ini file, to pytest's rootdir.

    Raises:
        UserError: if a value is not valid; the message lists the valid ones.
    """

    def value(name: str) -> str:
        given = config.getoption(f"parity_{name}")
        return str(config.getini(f"parity_{name}") if given is None else given).strip()

    name = parse_name(value("name"), "--parity-name")
    from_ini = config.getoption("parity_report") is None and config.inipath is not None
    start = config.rootpath if from_ini else config.invocation_params.dir
    return Options(
        precisions=parse_precisions(value("precisions"), "--parity-precisions"),
        backend=parse_backend(*_read_backend(config, value("backend"))),
        seeds=parse_seeds(value("seeds"), "--parity-seeds"),
        folder=start / value("report"),
        name=name,
        calibration=start / value("calibration") if value("calibration") else None,
        attention=parse_attention(value("attention"), "--parity-attention"),
        sizes=parse_sizes(value("sizes"), "--parity-sizes"),
        determinism=_parse_yes("determinism", value("determinism")),
        stages=_parse_yes("stages", value("stages")),
        unwritten=_parse_yes("unwritten", value("unwritten")),
        probe_weights=_parse_yes("probe-weights", value("probe-weights")),
        timeout=parse_timeout(value("timeout"), "--parity-timeout"),
        diagnosis=parse_diagnosis(value("diagnosis"), "--parity-diagnosis"),
        resume=_parse_yes("resume", value("resume")),
        steps=parse_steps(value("steps"), "--parity-steps"),
        training=_parse_yes("training", value("training")),
        decoding=_parse_yes("decoding", value("decoding")),
        engine=parse_engine(value("engine"), "--parity-engine"),
        address=value("address"),
        save_as=parse_baseline(value("save-as"), "--parity-save-as"),
        against=value("against"),
        start=config.invocation_params.dir,
        keep_runs=parse_keep_runs(value("keep-runs"), "--parity-keep-runs"),
        ci=parse_ci(value("ci"), "--parity-ci"),
        strict=_parse_yes("strict", value("strict")),
        json=start / value("json") if value("json") else None,
    )


def parse_baseline(text: str, option: str) -> str:
    """Return the name of a baseline; empty for none.

    Raises:
        UserError: if it is not a valid file name.
    """
    return parse_name(text, option) if text else ""


def check_against(text: str, start: Path, option: str) -> None:
    """Make sure that a run can be compared with this baseline or record, before hours of work.

    Raises:
        UserError: if there is none with this name, or it cannot be read.
    """
    from parity.report import record

    record.read(earlier.find(text, start, option))


def parse_keep_runs(text: str, option: str) -> int:
    """Return how many earlier runs are kept.

    Raises:
        UserError: if it is not a number.
    """
    if not (text.isascii() and text.isdigit() and len(text) < _DIGITS_OF_COUNTS):
        raise UserError(f"{option} is {text!r}, but must be a number of runs from 0")
    return int(text)


def parse_ci(text: str, option: str) -> frozenset[str]:
    """Return the chosen kinds of output for a CI system.

    Raises:
        UserError: if one is not in ``CI``.
    """
    if text in ("all", "none"):
        return frozenset(CI if text == "all" else ())
    chosen = frozenset(filter(None, (part.strip() for part in text.split(","))))
    if not chosen <= set(CI):
        raise UserError(f"{option} is {text!r}, but must be all, none, or some of {', '.join(CI)}")
    return chosen


def parse_steps(text: str, option: str) -> int | None:
    """Return a number of training steps; None for an empty text."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < _DIGITS_OF_COUNTS and int(text) <= MOST_STEPS):
        raise UserError(f"{option} is {text!r}, but must be a whole number from 0 to {MOST_STEPS}")
    return int(text)


def _read_backend(config: pytest.Config, text: str) -> tuple[str, str]:
    """Return the backend that was asked for, and the name of the option or variable that asked for it."""
    asked = os.environ.get(PARITY_BACKEND)
    if asked and config.getoption("parity_backend") is None:
        return asked, PARITY_BACKEND
    return text, "--parity-backend"


def _parse_yes(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise UserError(f"--parity-{name} is {text!r}, but must be yes or no")
    return text == "yes"


def check_files(options: Options) -> None:
    """Make sure, before anything is compared, that the report can be written and the table of limits can be read.

    Raises:
        UserError: if not; the message names the option.
    """
    for file in (options.record, options.report):
        check_file(file, "--parity-report")
    if options.json is not None:
        check_file(options.json, "--parity-json")
    if options.calibration is not None:
        check_calibration(options.calibration, "--parity-calibration")
    if options.save_as:
        check_file(earlier.path_of(options.save_as, options.start), "--parity-save-as")
    if options.against:
        check_against(options.against, options.start, "--parity-against")


# The following functions take the name of the option that the user gave, since commands and the plugin name it
# differently.


def check_calibration(file: Path, option: str) -> None:
    """Make sure that the table of limits can be read.

    Raises:
        UserError: if not.
    """
    from parity.judge import limits

    try:
        limits.load(file)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def parse_name(text: str, option: str) -> str:
    """Return the name of a report's files.

    Raises:
        UserError: if it is not a valid file name.
    """
    if not re.fullmatch(rf"\w[\w.-]{{0,{_LONGEST_NAME - 1}}}", text):
        raise UserError(
            f"{option} is {text!r}, but must be a file name of up to {_LONGEST_NAME} letters, digits, '_', '-' and '.'"
        )
    return text


def parse_backend(text: str, option: str = "--backend (or PARITY_BACKEND)") -> Literal["auto", "gpu", "cpu"]:
    """Return one of ``BACKENDS``.

    Raises:
        UserError: if the text is none of them.
    """
    if text not in BACKENDS:
        raise UserError(f"{option} is {text!r}, but must be one of {', '.join(BACKENDS)}")
    return cast(Literal["auto", "gpu", "cpu"], text)


def parse_engine(text: str, option: str = "--engine") -> str:
    """Return ``local``, or the name of an installed engine.

    Raises:
        UserError: if the text is neither; lists the engines that are installed.
    """
    if text != engines.LOCAL and text not in (installed := engines.list_engines()):
        known = ", ".join((engines.LOCAL, *sorted(installed)))
        raise UserError(
            f"{option} is {text!r}, but must be one of {known}; others come with packages that announce them "
            f"(entry point group {engines.ENTRY_POINT_GROUP})"
        )
    return text


def parse_sizes(text: str, option: str = "--sizes") -> str:
    """Return one of ``SIZES``.

    Raises:
        UserError: if the text is none of them.
    """
    if text not in SIZES:
        raise UserError(f"{option} is {text!r}, but must be one of {', '.join(SIZES)}")
    return text


def parse_attention(text: str, option: str = "--attention") -> str:
    """Return one of ``parity.te.attention_backend.CHOICES``.

    Raises:
        UserError: if the text is none of them.
    """
    if text != "auto":
        from parity.te.attention_backend import checked_choice

        try:
            checked_choice(text)
        except UserError as error:
            raise UserError(f"{option}: {error}") from None
    return text


def parse_precisions(text: str, option: str = "--precision") -> tuple[str, ...] | None:
    """Return names from a comma-separated list, which may name recipes as ``FILE::NAME``; None for an empty one.

    Raises:
        UserError: if a name is unknown.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        return None
    if not any("::" in name for name in names):
        check_precisions(names, option)  # without torch
        return names
    from parity.case.recipes import name_precisions

    return name_precisions(names, option)


def parse_precision(text: str) -> str:
    """Return the name of the one precision that ``--precision`` names.

    Raises:
        UserError: if it is unknown, or if there are several.
    """
    names = parse_precisions(text)
    if names is None or len(names) != 1:
        raise UserError(f"--precision is {text!r}, but must name one precision")
    return names[0]


def parse_seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """Read seeds: ``20`` means 0 to 19, ``0,3,7`` these three, ``3,`` only 3, ``0`` only 0, ``100-149`` a range.

    Raises:
        UserError: if the text is none of these.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    ranges = [re.fullmatch(r"(\d{1,40})(?:-(\d{1,40}))?", part) for part in parts]
    if parts and all(ranges):
        ends = [(int(found[1]), int(found[2] or found[1])) for found in ranges if found]
        if "," not in text and "-" not in text and ends[0][1]:
            ends = [(0, ends[0][0] - 1)]
        count = sum(max(0, last - first + 1) for first, last in ends)
        if count > _MOST_SEEDS or max(last for _, last in ends) > _LAST_SEED:
            raise UserError(f"{option} is {text!r}, but at most {_MOST_SEEDS:,} seeds up to 2**63 - 1 can be compared")
        seeds = [seed for first, last in ends for seed in range(first, last + 1)]
        if seeds:
            return tuple(dict.fromkeys(seeds))
    raise UserError(
        f"{option} is {text!r}, but must be a count (20 runs the seeds 0 to 19; 0 runs seed 0), a range "
        "(100-149), or a list with a comma (0,3,7; or 3, for seed 3 alone)"
    )


def parse_timeout(text: str, option: str = "--timeout") -> float:
    """Return seconds; 0 for no limit.

    Raises:
        UserError: if the text is not a number of seconds.
    """
    seconds = seconds_of(text)
    if seconds is None:
        raise UserError(f"{option} is {text!r}, but must be a number of seconds up to {LONGEST:.0g}, or 0 for no limit")
    return seconds


def parse_diagnosis(text: str, option: str = "--diagnosis") -> float | None:
    """Return the seconds that a search for a cause may take, 0 for no limit; None for no search.

    Raises:
        UserError: if the text is not yes, no or a number of seconds.
    """
    if text == "no":
        return None
    seconds = default_seconds() if text == "yes" else seconds_of(text)
    if seconds is None:
        raise UserError(f"{option} is {text!r}, but must be yes, no, or a number of seconds, 0 for no limit")
    return seconds
