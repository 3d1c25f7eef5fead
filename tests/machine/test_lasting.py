"""What lives as long as the process is no matter for the garbage collector."""

from __future__ import annotations

import gc

import pytest

from parity.machine.process import lasting


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()


def test_nothing_is_collected_within():
    with lasting():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_within_is_not_looked_at_again():
    with lasting():
        made = [[] for _ in range(1000)]
    ids = {id(one) for one in made}
    assert not any(id(one) in ids for one in gc.get_objects())


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with lasting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_collects_again_after_an_import_that_fails():
    with pytest.raises(ImportError), lasting():
        raise ImportError
    assert gc.isenabled()
