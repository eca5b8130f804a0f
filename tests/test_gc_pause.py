"""The collector rests during loads, but not for as long as a server loads without a break."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moegraft import gc_pause
from moegraft.gc_pause import ALL_EVERY, gc_paused

WAIT = 20.0


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@contextmanager
def paused_elsewhere(strict: bool = False) -> Iterator[None]:
    """Another thread is in a block of its own."""
    inner, done = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused(strict):
            inner.set()
            done.wait(WAIT)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert inner.wait(WAIT)
    try:
        yield
    finally:
        done.set()
        thread.join(WAIT)


def test_the_collector_rests_until_the_last_pause_ends_and_stays_off_if_it_was() -> None:
    assert gc.isenabled()
    with paused_elsewhere():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "another thread's pause is not over"
    assert gc.isenabled()
    with gc_paused():
        with paused_elsewhere():
            pass
        assert not gc.isenabled(), "this thread's pause is not over"
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_that_overlap_without_end_collect_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paused_elsewhere():
        monkeypatch.setattr(gc_pause, "PERIOD", 1000.0)
        found = weakref.ref(Cycle())
        with gc_paused():
            pass
        assert found() is not None, "not yet"
        monkeypatch.setattr(gc_pause, "PERIOD", 0.0)
        with gc_paused():
            pass
        assert found() is None and not gc.isenabled()
        old = Cycle()
        gc.collect()
        gc.collect()  # it is among the old ones now
        found = weakref.ref(old)
        del old
        for _ in range(ALL_EVERY):
            with gc_paused():
                pass
        assert found() is None and not gc.isenabled()


def test_nothing_is_collected_during_a_strict_pause_or_when_the_collector_was_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_pause, "PERIOD", 0.0)
    with paused_elsewhere():
        with paused_elsewhere(strict=True):
            found = weakref.ref(Cycle())
            for _ in range(ALL_EVERY):
                with gc_paused():
                    pass
            assert found() is not None
        assert found() is None, "the strict pause's end collects"
    gc.disable()
    try:
        with paused_elsewhere():
            found = weakref.ref(Cycle())
            with gc_paused():
                pass
            assert found() is not None
    finally:
        gc.enable()
