"""Every target of `targets`: the kept corpus, and what hypothesis makes of it.

`FUZZ_EXAMPLES=20000 pytest tests/fuzz` (make fuzz) looks further than the gate does, from another
place each time. An input that breaks a rule is kept in `corpus/TARGET/found.bin`, as small as
hypothesis could make it: give it a name there when the fault is mended.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
# The gate's share, and the same inputs each time; a run of `make fuzz` says how many it wants.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
GATE_EXAMPLES = {"codec": 400, "peers": 60, "config": 80, "keys": 120}
KEPT = sorted(CORPUS.glob("*/*.bin"))


def profile(name: str) -> Any:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    common = {"deadline": None, "suppress_health_check": quiet}
    if EXAMPLES:
        kept = DirectoryBasedExampleDatabase(CORPUS / "examples")
        return settings(max_examples=EXAMPLES, database=kept, **common)
    return settings(
        max_examples=GATE_EXAMPLES.get(name, 150), derandomize=True, database=None, **common
    )


def keep(name: str, value: Any) -> None:
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    (CORPUS / name / "found.bin").write_bytes(msgpack.packb(value))


@pytest.mark.parametrize("name", TARGETS)
def test_made_inputs(name: str) -> None:
    target = TARGETS[name]

    @profile(name)
    @given(st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        value = target.make(rng)
        try:
            target.check(value)
        except Exception:
            keep(name, value)
            raise

    run()


@pytest.mark.skipif(not EXAMPLES, reason="`make fuzz` looks at plain seeds as well")
@pytest.mark.parametrize("name", TARGETS)
def test_plain_seeds(name: str) -> None:
    """Hypothesis prefers small inputs; a plain generator does not."""
    target, first = TARGETS[name], random.SystemRandom().getrandbits(48)
    for seed in range(first, first + EXAMPLES):
        value = target.make(random.Random(seed))
        try:
            target.check(value)
        except Exception:
            keep(name, value)
            raise


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kept_inputs(path: Path) -> None:
    TARGETS[path.parent.name].check(msgpack.unpackb(path.read_bytes(), strict_map_key=False))


def test_every_target_has_kept_inputs() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no check could fail would prove nothing: a decoder that raises is noticed."""
    from zfabric import protocol

    monkeypatch.setattr(protocol, "NESTING_MAX", "eight")
    with pytest.raises(TypeError):
        for seed in range(500):
            TARGETS["codec"].check(TARGETS["codec"].make(random.Random(seed)))
