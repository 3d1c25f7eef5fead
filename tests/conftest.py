"""What all tests share."""

import os
from collections.abc import Iterator

import fakes
import pytest
from hypothesis import settings

from parity.case import registry
from parity.settings import VARIABLE

# No test asserts a time.
settings.register_profile("parity", deadline=None)
settings.load_profile("parity")

# No finding depends on how fast the machine is: where a test says nothing else, a search ends by what it has computed.
os.environ[VARIABLE] = "0"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin compares nothing, and what is declared meanwhile is forgotten."""
    fakes.install(monkeypatch)
    declared = registry.cases()
    yield
    registry.restore(declared)
