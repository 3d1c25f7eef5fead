"""Runs trials in parallel processes and records each as soon as it is judged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parity import te
from parity.lab import record
from parity.lab.zoo.catalogue import BUGS, HOSTS
from parity.lab.zoo.planting import Bug
from parity.lab.zoo.trial import CLEAN, Trial, Verdict, from_json, judge, to_json
from parity.machine.process import processes
from parity.te.precision import PRECISIONS, why_unavailable


@dataclass(frozen=True)
class Plan:
    """What a run judges.

    Attributes:
        bugs: to plant, each in all of its hosts.
        hosts: right ports to judge as well.
        precisions: of all, where a bug can occur.
        seeds: by size, ``small`` or ``large``, how many seeds of weights and inputs, from 0.
    """

    bugs: tuple[Bug, ...]
    hosts: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: Mapping[str, int]

    def trials(self) -> list[Trial]:
        """Right ports first."""
        places = [
            (size, precision, seed)
            for size, count in self.seeds.items()
            for seed in range(count)
            for precision in self.precisions
        ]
        clean = [Trial(CLEAN, host, *place) for place in places for host in self.hosts]
        mistaken = [Trial(bug.name, host, *place) for place in places for bug in self.bugs for host in bug.hosts]
        return [trial for trial in clean + mistaken if occurs(trial)]


def run(plan: Plan, path: Path, workers: int) -> dict[Trial, Verdict]:
    """Judge what the record has not yet, and return all of the plan's verdicts.

    A record is of one version of parity and TE; start another one after a change.

    Args:
        plan: what to judge.
        path: of the record, JSON lines.
        workers: processes, each with one thread.
    """
    done = {Trial(**entry): verdict for entry, verdict in _read(path)}
    trials = plan.trials()
    missing = [trial for trial in trials if trial not in done]
    for trial, verdict in _judged(missing, workers):
        record.append(path, dataclasses.asdict(trial), to_json(verdict))
        done[trial] = verdict
    return {trial: done[trial] for trial in trials if trial in done}


def unavailable(precisions: Sequence[str]) -> dict[str, str]:
    """Precisions that this machine cannot run, each with the reason."""
    kernels = te.kernels()
    reasons = {name: why_unavailable(PRECISIONS[name], kernels) for name in precisions}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _read(path: Path) -> Iterator[tuple[dict[str, Any], Verdict]]:
    for key, result in record.read(path).items():
        yield json.loads(key), from_json(result)


def _judged(trials: Sequence[Trial], workers: int) -> Iterator[tuple[Trial, Verdict]]:
    if workers == 1:
        with _one_thread():
            yield from ((trial, _judge_here(trial)) for trial in trials)
        return
    with processes(workers) as pool:
        futures = {pool.submit(_judge_here, trial): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _judge_here(trial: Trial) -> Verdict:
    return judge(trial, te.kernels())


def occurs(trial: Trial) -> bool:
    """Return whether its host runs at its precision, and its bug can be made there."""
    if not HOSTS[trial.host].runs_at(trial.precision):
        return False
    return trial.bug == CLEAN or BUGS[trial.bug].occurs_at(trial.precision)


def hosts_of(bugs: Iterable[Bug]) -> tuple[str, ...]:
    """Return each host of the bugs once."""
    return tuple(dict.fromkeys(host for bug in bugs for host in bug.hosts))
