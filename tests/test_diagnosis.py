"""Diagnosis: since when a verdict holds, and since when there is no room."""

from __future__ import annotations

from zfabric.diagnosis import TOKENS_MIN, Diagnosis


def test_verdict_is_true_since_it_was_first_said() -> None:
    known = Diagnosis()
    seen = [
        known.judge(verdict, TOKENS_MIN, now)
        for now, verdict in enumerate(["healthy", "healthy", "capacity", "capacity", "healthy"])
    ]
    assert seen == [True, False, True, False, True]
    assert known.since("healthy") == 4
    assert known.since("capacity") is None


def test_first_batches_say_nothing() -> None:
    known = Diagnosis()
    assert not known.judge("growth", TOKENS_MIN - 1, 1.0)
    assert known.since("growth") is None


def test_room_is_told_of_when_it_goes_and_when_it_is_back() -> None:
    known = Diagnosis()
    assert not known.found_room(None, 1.0)
    assert known.found_room("0 bytes are free", 2.0)
    assert not known.found_room("1 byte is free", 3.0)
    assert (known.no_space, known.no_space_s) == ("0 bytes are free", 2.0)
    assert known.found_room(None, 4.0)
    assert (known.no_space, known.no_space_s) == (None, None)
