"""What becomes of a run that is asked to end early: it keeps what it compared, and draws its report.

Batch systems send SIGTERM some time before they kill; here it counts as Ctrl-C does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Container, Iterable
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from parity.plugin import lines
from parity.plugin.diary import Diary

if TYPE_CHECKING:
    from parity.plugin.item import ParityItem

RECORDER = "parity-recorder"
REASON = "interrupted before all of its seeds were compared"


def heed_sigterm(config: pytest.Config) -> None:
    """Have SIGTERM interrupt this process as SIGINT does, until pytest is done; another handler stays."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
        config.add_cleanup(_end_at_sigterm)


def keep_finished_seeds(item: ParityItem) -> None:
    """Record the seeds that an interrupted item has compared, and that it is not complete.

    pytest reports no item that was interrupted. In a worker nobody listens any more; see below.
    """
    recorder = item.config.pluginmanager.getplugin(RECORDER)
    if recorder is None or not (item.results or item.verdict):
        return
    if len(item.results) < len(item.options.seeds):
        item.results.append(item.cut_short(REASON))
    recorder.record(lines.of_item(item))


def record_meanwhile(item: ParityItem) -> None:
    """Record an item's seeds, the last with its verdict alone, until the item's lines replace them.

    Nobody else can once this process is killed. A worker has its diary, which the controller reads.
    """
    recorder = item.config.pluginmanager.getplugin(RECORDER)
    if recorder is not None:
        recorder.record_meanwhile(lines.environment_line(item), lines.of_results([*item.results, item.cut_short("")]))


def keep_finished_seeds_of_workers(config: pytest.Config, diaries: Iterable[Diary], reported: Container[str]) -> None:
    """The same of the items in which workers are, from what they noted of them.

    Args:
        config: of the process that writes the record.
        diaries: of the workers.
        reported: ids of the items whose results arrived.
    """
    recorder = config.pluginmanager.getplugin(RECORDER)
    for diary in diaries:
        left = diary.read_last()
        if recorder is None or left is None or left[0].node_id in reported:
            continue
        entry, finished = left
        complete = [line for line in finished if line.endswith("\n")]  # the worker may be writing another
        if complete or entry.has_verdict:
            recorder.record({"environment": entry.environment, "results": [*complete, entry.ended_by(REASON)]})


def _end_at_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
