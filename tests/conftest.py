"""What all tests share."""

from collections.abc import Iterator

import fakes
import pytest
from hypothesis import settings

from parity import registry

# No test asserts a time.
settings.register_profile("parity", deadline=None)
settings.load_profile("parity")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin compares nothing, and what is declared meanwhile is forgotten."""
    fakes.install(monkeypatch)
    declared = registry.cases()
    yield
    registry.restore(declared)
