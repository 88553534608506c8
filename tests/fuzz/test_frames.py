"""The short form of `python -m tests.fuzz.frames`: the same load, a hundredth of the frames."""

from __future__ import annotations

import pytest

from tests.fuzz import frames


@pytest.mark.e2e
def test_broker_lives_beside_fuzzed_frames_and_a_healthy_client_gets_every_result() -> None:
    """Design 7, fault 16: random bytes, a port scanner, fuzzed frames."""
    figures = frames.run(10_000, 1_000, seed=7)
    assert figures["alive"]
    assert figures["frames"] >= 10_000
    assert figures["refused"] > 1_000
    assert figures["client"]["completed"] == figures["client"]["submitted"] > 0
    assert figures["ok"]


def test_figures_that_do_not_pass_are_told_from_those_that_do() -> None:
    client = {"submitted": 10, "completed": 10}
    good = {"rss_bytes": [5, 6], "alive": True, "client": client}
    assert frames.judged(dict(good))["ok"]
    for change in (
        {"alive": False},
        {"rss_bytes": [0, frames.FLAT_BYTES + 1]},
        {"client": {"submitted": 10, "completed": 9}},
        {"client": {}},
    ):
        assert not frames.judged({**good, **change})["ok"]
