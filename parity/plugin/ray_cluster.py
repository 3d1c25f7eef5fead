"""Connect to a Ray cluster, find out what it has, and run parts of a run as its tasks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any, Literal

from parity.plugin import ray_task
from parity.plugin.ray_task import Job
from parity.user_error import UserError

LOCAL = "local"  # the address of a cluster that is started for the run, on this machine
_PREFIXES = ("NVTE_", "PARITY_", "PYTEST_ADDOPTS")
_SECONDS_TO_ANSWER = 10.0
_OF_THIS_MACHINE = "PARITY_DEVICES"


class LostError(Exception):
    """Raised if a task's process or node does not answer any more."""


class Cluster:
    """A cluster that this process is connected to, until it is left.

    Args:
        address: as Ray wants it; empty for the one that ``RAY_ADDRESS`` names, or that runs on this machine.
        backend: whose kernels run; ``auto`` takes GPUs if the cluster has some.

    Raises:
        UserError: if Ray is not installed, there is no such cluster, or it has no GPUs and they were asked for.
    """

    def __init__(self, address: str, backend: Literal["auto", "gpu", "cpu"]) -> None:
        self._ray = _connected(address)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.cpus, self.gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
        self.nodes = len(nodes)
        self._most_cpus, self.most_gpus = (int(max(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
        self.with_gpus = backend != "cpu" and self.gpus > 0
        try:
            if backend == "gpu" and not self.gpus:
                raise UserError(
                    f"the backend gpu was asked for, but the Ray cluster has no GPU, on {self.nodes} nodes with "
                    f"{self.cpus} CPUs; `ray status` shows what it has, and `ray start --num-gpus` says what a node has"
                )
            if not self.cpus:
                raise UserError("the Ray cluster has no CPUs; `ray start --num-cpus` says what a node has")
        except UserError:
            self.leave()
            raise
        self._task = self._ray.remote(ray_task.work)

    @property
    def at_once(self) -> int:
        """Return how many items can be compared at the same time."""
        return max(1, self.gpus if self.with_gpus else self.cpus)

    def start(self, job: Job, processes: int) -> Any:
        """Start a task that has a core, and a GPU if there are any, for each process; all on one node.

        Returns:
            The stream of its messages.
        """
        return self._task.options(
            num_returns="streaming",
            max_retries=0,  # what has been reported is not to be compared again
            num_cpus=min(processes, self._most_cpus),  # processes may share cores
            num_gpus=processes if self.with_gpus else 0,
        ).remote(job)

    def heard(self, streams: Sequence[Any]) -> list[Any]:
        """Return those of the streams that have a message or have ended; wait for the first."""
        self._ray.wait(streams, num_returns=1, fetch_local=False)
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
        return list(ready)

    def messages(self, stream: Any) -> list[str] | None:
        """Return a stream's next messages; None if it has ended.

        Raises:
            LostError: if its process or its node is lost.
            UserError: if Ray cannot run it at all.
        """
        from ray import exceptions

        try:
            lines: list[str] = self._ray.get(next(stream))
            return lines
        except StopIteration:
            return None
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
            raise UserError(f"Ray could not run a part of this run: {_first_line(error)}") from None
        except exceptions.RayError as error:
            raise LostError(_first_line(error)) from None

    def stop(self, streams: Sequence[Any]) -> None:
        """End these tasks."""
        for stream in streams:
            self._ray.cancel(stream)

    def leave(self) -> None:
        """Disconnect; Ray ends what is still there of this process's."""
        self._ray.shutdown()

    def brings_files(self) -> bool:
        """Return whether Ray has taken the run's files to the nodes, as ``ray job submit --working-dir`` does."""
        return bool(self._ray.get_runtime_context().runtime_env.get("working_dir"))


def variables() -> dict[str, str]:
    """Return the variables of the environment that a run's own workers would have, and on which comparisons depend."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) and name != _OF_THIS_MACHINE
    }


def _connected(address: str) -> Any:
    """Return Ray, connected.

    Raises:
        UserError: if that is not possible.
    """
    try:
        import ray
    except ImportError:
        raise UserError("the engine ray needs the package ray: pip install 'te-parity[ray]'") from None
    if address.startswith("ray://"):
        raise UserError(
            f"the address {address} is that of Ray's client server, which has no streams; start the run on a node of "
            "the cluster, or with `ray job submit`"
        )
    ray.cloudpickle.register_pickle_by_value(ray_task)
    options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"at {address}" if address else "on this machine, and RAY_ADDRESS names none"
        raise UserError(
            f"no Ray cluster answers {where}: {_first_line(error)}; `ray start --head` starts one, and "
            f"--address {LOCAL} one for this run alone"
        ) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end this process without a report
    return ray


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1 if "Traceback" in str(error) else 0]
