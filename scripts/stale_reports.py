"""List the reports and results of benchmarks whose code has changed since they were made.

    python scripts/stale_reports.py [--all]

A report names the commit that made it in its last line, in its table of facts, or in its first lines. Older ones only
name the commit in which they came, or the last before their date. These are marked with ``<=``: they were made at that
one or before. A report is stale if the code that it depends on has changed since. Whether its figures have, only a new
run tells.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from parity.report.numbers import markdown_table

ROOT = Path(__file__).resolve().parents[1]
# What decides on a verdict, and what names a cause; both relative to parity/.
VERDICT = (
    *("case", "comparison.py", "../te_on_cpu", "judge", "numerics", "passes", "ranks", "te", "trace", "trainings"),
)
CAUSE = (*VERDICT, "mistakes", "search")
KERNELS = ("../te_on_cpu", "te")
DEPENDS = {
    "reports/versions.md": ("../pyproject.toml", "../constraints.txt"),
    "reports/te-matrix.md": KERNELS,
    "reports/nvidia_tests.md": (*KERNELS, "../lab/nvidia_tests"),
    "reports/torture.md": ("machine", "plugin", "data_files.py", "report"),
    "reports/calibration*.md": (*VERDICT, "measuring/calibration.py", "measuring/right_ports.py", "measuring/hosts"),
    "reports/false_alarms*.md": (*VERDICT, "measuring/right_ports.py", "measuring/hosts"),
    "reports/zoo*.md": (*CAUSE, "../lab/zoo", "../lab/corpus", "measuring/hosts"),
    "reports/kernel_freedoms.md": (*VERDICT, "../lab/zoo", "../lab/corpus", "measuring/hosts"),
    "reports/judge_constants.md": (*VERDICT, "measuring/right_ports.py", "measuring/hosts", "../lab/corpus"),
    "reports/h?00/*.md": CAUSE,
    "reports/recipes/*.md": (*VERDICT, "advice"),
    "reports/studies/names.md": (*CAUSE, "../lab/studies/names/study.py", "../lab/corpus"),
    "reports/studies/ranks.md": (*CAUSE, "../lab/studies/ranks/study.py", "../lab/corpus"),
    "reports/studies/trainings.md": (*CAUSE, "../lab/studies/trainings/study.py", "../lab/corpus"),
    "reports/studies/*.md": (*KERNELS, "numerics", "../lab/studies/{name}"),
    "reports/*.md": CAUSE,
    "benchmarks/results/*.json": (*CAUSE, "plugin", "report", "../benchmarks/{name}.py"),
}
"""What each report depends on, relative to parity/; the first pattern that fits counts."""
_MADE_AT = re.compile(r"(?<!committed) at commit ([0-9a-f]{7,40})\b")
_COMMITTED_AT = re.compile(r"committed at commit ([0-9a-f]{7,40})\b")


@dataclass(frozen=True)
class Age:
    """How old a report is.

    Attributes:
        file: its path in the checkout.
        commit: the commit that made it.
        is_told: whether the report says so; else it was made at this commit or before.
        since: how many commits have come since, without merges.
        changed: which of the folders and files that it depends on have changed since.
    """

    file: str
    commit: str
    is_told: bool
    since: int
    changed: tuple[str, ...]


def ages() -> Iterator[Age]:
    """Yield the age of each committed report and result."""
    for file in git("ls-files", "--", "reports/*.md", "benchmarks/results/*.json"):
        commit, is_told = told_commit((ROOT / file).read_text(encoding="utf-8"), file)
        if commit:
            (since,) = git("rev-list", "--count", "--no-merges", f"{commit}..HEAD")
            yield Age(file, commit, is_told, int(since), tuple(changed_since(commit, depends(file))))


def told_commit(text: str, file: str) -> tuple[str, bool]:
    """Return the commit that a report names, or an empty text, and whether the report was made at it."""
    if file.endswith(".json"):
        commit, _, more = json.loads(text)["machine"].get("commit", "").partition(",")
        return commit.removesuffix(" with changes"), not more
    for pattern, is_told in ((_MADE_AT, True), (_COMMITTED_AT, False)):
        found = pattern.findall(text)
        if found:
            return found[-1], is_told
    return "", False


def depends(file: str) -> tuple[str, ...]:
    """Return the paths, in the checkout, that a report depends on."""
    parts = next(parts for pattern, parts in DEPENDS.items() if fnmatch(file, pattern))
    paths = (Path("parity", part.format(name=Path(file).stem)).as_posix() for part in parts)
    return tuple(path.replace("parity/../", "") for path in paths)


def changed_since(commit: str, paths: tuple[str, ...]) -> Iterator[str]:
    """Yield those of the paths that have changed since a commit."""
    changed = git("diff", "--name-only", commit, "HEAD", "--", *paths)
    for path in paths:
        if any(one == path or one.startswith(f"{path}/") for one in changed):
            yield path.removeprefix("parity/")


def git(*words: str) -> list[str]:
    """Return the lines that git prints.

    Raises:
        subprocess.CalledProcessError: if git knows no such commit.
    """
    ran = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="list the reports that are up to date as well")
    wants_all = parser.parse_args().all
    found = sorted(ages(), key=lambda age: -age.since)
    rows = [
        (one.file, f"{'' if one.is_told else '<= '}{one.commit}", one.since, ", ".join(one.changed))
        for one in found
        if one.changed or wants_all
    ]
    print(markdown_table(rows, ["report", "commit", "commits since", "changed since"], left=2))
    print(f"{sum(bool(one.changed) for one in found)} of {len(found)} are older than code that they depend on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
