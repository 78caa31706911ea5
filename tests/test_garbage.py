"""Blocks without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from compile_and_serve.garbage import no_garbage_collection


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    """As it was before."""
    was_enabled = gc.isenabled()
    gc.unfreeze()  # what engines of other tests froze
    gc.enable()
    yield
    gc.unfreeze()
    if not was_enabled:
        gc.disable()


def test_the_collector_is_off_in_the_block() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection(stays=True):
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), no_garbage_collection():
        raise KeyError
    assert gc.isenabled()


def of_generation(generation: int, found: object) -> bool:
    return any(one is found for one in gc.get_objects(generation))


def test_what_stays_counts_as_old() -> None:
    assert gc.get_freeze_count() < 1000
    with no_garbage_collection():
        young: list[object] = [[]]
    assert of_generation(0, young)
    with no_garbage_collection(stays=True):
        old: list[object] = [[]]
    assert of_generation(2, old)
    assert not of_generation(0, old)


def test_what_others_froze_stays_frozen() -> None:
    kept: list[object] = [[]]
    gc.freeze()
    with no_garbage_collection(stays=True):
        pass
    assert not any(of_generation(generation, kept) for generation in range(3))
    gc.unfreeze()
    assert of_generation(2, kept)
