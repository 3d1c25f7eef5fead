"""Share fixtures among all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import leave_out_rows
from hypothesis import settings

from parity.settings import VARIABLE

# Use one thread in each process, including those that tests start; PyTorch reads the variable when it is imported. In
# small products, threads that wait for each other take ten times the processor time of the product itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Keep byte code for the next process even where none may be written beside the sources, as in many containers.
# Otherwise each of the hundreds of processes that tests start would compile all its imports again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    kept = Path(__file__).parents[1] / ".pytest_cache" / "d" / "bytecode"
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(kept))
    sys.dont_write_bytecode = False

# Make Ctrl-C work as in a terminal, also for the tests' own processes, if this process ignores it (nohup).
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test fails because it is slow.
settings.register_profile("parity", deadline=None)
settings.load_profile("parity")

# Findings must not depend on the machine's speed: unless a test says otherwise, real time does not limit a search.
os.environ[VARIABLE] = "0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_rows(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a file to one worker if there are many files, since they share what takes long to make."""
    if config.getvalue("dist") != "load":
        return None
    from parity.plugin.workers import GroupScheduling, is_item

    class SchedulingByFile(GroupScheduling):
        def schedule(self) -> None:
            names = next(iter(self.registered_collections.values()))
            self._by_file = len({name.partition("::")[0] for name in names}) > 5 * len(self.nodes)
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            return file if self._by_file and name.startswith("test_") else super()._split_scope(nodeid)

        def _sort_groups(self) -> None:
            """Keep files in their order, after the cases."""
            for scope in dict.fromkeys(map(self._split_scope, self.collection or ())):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope)
            super()._sort_groups()
            for scope in [scope for scope in self.workqueue if not is_item(next(iter(self.workqueue[scope])))]:
                self.workqueue.move_to_end(scope)

    return SchedulingByFile(config, log)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def forgets_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the pairs of the test and of files that it wrote, and their modules: others may have the same names."""
    before = set(sys.modules)
    declared = _list_declared()
    yield
    written = tmp_path_factory.getbasetemp()
    for name in set(sys.modules) - before:
        if written in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
            del sys.modules[name]
    now = _list_declared()
    kept = [x for x in now if x in declared or not (x.path == request.path or written in x.path.parents)]
    if len(kept) < len(now):
        sys.modules["parity.case.registry"].restore(kept)


def _list_declared() -> list[Any]:
    registry = sys.modules.get("parity.case.registry")
    return registry.cases() if registry is not None else []


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the plugin's comparison with a stand-in."""
    import fakes

    fakes.install(monkeypatch)
