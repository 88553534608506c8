"""The explanation of waste: three runs with three causes, parts that add up, every verdict."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards import ADDRESS, Clock, Day, FakeFeed, a_day, screen_of
from tests.harness import Bench
from tests.running import FAST, brokering, operating, serving, until
from zfabric import Client, Item
from zfabric.explain import CAUSES, explain
from zfabric.lanes import QUIESCE_AFTER_S
from zfabric.ledger import Parts
from zfabric.shapes import Contract, Shape
from zfabric.whatif import SAMPLE_MIN, Run, simulate
from zfabric_tui.app import TopApp

TRACE = Path(__file__).parents[2] / "shared" / "data" / "azure_llm_2023_code.csv"
ITEMS_PER_S = 5_000.0
BACKLOG = 2_000
MESSAGE = 256
CONTRACT: dict[str, Any] = {"model": "m", "batch": 32, "tokens": 65_536, "longest": 8_192}


def trace() -> list[int]:
    """Context lengths of a code service, or their synthetic twin where the trace is not at hand."""
    if TRACE.is_file():
        with TRACE.open(encoding="utf-8") as stream:
            return [int(float(row["context_tokens"])) for row in csv.DictReader(stream)]
    chance = random.Random(11)
    return [min(7_437, 3 + int(chance.lognormvariate(7.2, 1.0))) for _ in range(8_819)]


def run_of(lengths: list[int], **config: Any) -> dict[str, Any]:
    """The status some time after `lengths` came at a steady pace through a real dispatcher.

    One card is always ready; so much waits meanwhile as `BACKLOG` says. In the end all is done.
    """
    bench = Bench(linger_ms=0, max_wait_s=0, max_items=10_000_000, **config)
    bench.tick()
    producer = bench.producer()
    card = bench.worker(**CONTRACT)
    shape = Shape.of("m", "a", tokens=[16])
    for start in range(0, len(lengths), MESSAGE):
        message = lengths[start : start + MESSAGE]
        producer.submit(message, shape)
        bench.tick(len(message) / ITEMS_PER_S)
        while bench.fabric.store.ready_items > BACKLOG:
            assert bench.dispatch(1)
            for key in list(card.batches):
                card.done(key)
            card.heartbeat()
        bench.settle()
        producer.ack()
    while bench.dispatch(1):
        for key in list(card.batches):
            card.done(key)
        card.heartbeat()
    # The verdict is of the run: nothing waits any more, and the idle lanes retire.
    for _ in range(2):
        bench.tick(2 * QUIESCE_AFTER_S)
    status = {**bench.dispatcher.meta(bench.now), **bench.status()}
    assert status["residual_items"] == 0 == status["ready_items"]
    assert status["lane_pressure_ratio"] == 0.0
    return status


@pytest.fixture(scope="module")
def capacity() -> dict[str, Any]:
    return run_of(trace(), lanes=128)


def test_run_with_128_lanes_is_explained_as_capacity(capacity: dict[str, Any]) -> None:
    said = explain(capacity)
    assert said.verdict == "capacity"
    pressure, threshold = (said.numbers[f"{name}_run"] for name in (
        "lane_pressure_ratio", "waste_threshold_ratio",
    ))  # fmt: skip
    assert isinstance(pressure, float) and 0.5 < pressure <= 1.0
    assert threshold == pytest.approx(0.01 + 0.09 * pressure)
    assert said.command == "zfabric broker --lanes 2048"
    assert "--what-if lanes=2048" in said.advice
    assert said.since is not None and said.since < capacity["time"]


def test_run_with_16_lanes_is_explained_as_capacity_by_force() -> None:
    said = explain(run_of(trace(), lanes=16))
    assert (said.verdict, said.numbers["largest_part"]) == ("capacity", "forced")
    assert "is forced" in said.rule and said.numbers["lane_pressure_ratio_run"] > 0.9


def test_same_run_with_2048_lanes_is_healthy(capacity: dict[str, Any]) -> None:
    few, said = explain(capacity), explain(run_of(trace(), lanes=2_048))
    assert said.verdict == "healthy"
    assert sum(part.tokens for part in said.parts if part.cause == "forced") == 0
    assert said.waste_ratio < 0.8 * few.waste_ratio
    assert said.numbers["lane_pressure_ratio_run"] < 0.2
    assert said.cost_ratio is not None and few.cost_ratio is not None
    assert said.cost_ratio < few.cost_ratio


def test_run_of_short_prompts_is_explained_as_short_prompts() -> None:
    said = explain(run_of(lengths_of_short_prompts()))
    assert said.verdict == "short prompts"
    assert "--ragged" in said.advice


def lengths_of_short_prompts() -> list[int]:
    chance = random.Random(5)
    return [chance.randint(3, 60) for _ in range(12_000)]


@pytest.mark.parametrize(
    ("lengths", "lanes", "verdict"),
    [(trace, 16, "capacity"), (trace, 128, "capacity"), (trace, 2_048, "healthy"),
     (lengths_of_short_prompts, 2_048, "short prompts")],
)  # fmt: skip
def test_broker_that_has_run_it_says_so(
    lengths: Callable[[], list[int]], lanes: int, verdict: str
) -> None:
    """Sockets, processes and the clock of the wall: once the run is over, and from then on."""
    sent = lengths()
    shape = Shape.of("m", "a", tokens=[16])
    # Numbered as the lines of a batch file are, so that they are sent as they come: sorted by the
    # thousand, the trace wastes half as much, and 128 lanes do.
    items = (Item(shape, b"x", length, number=k) for k, length in enumerate(sent, 1))
    contract = Contract(CONTRACT["batch"], CONTRACT["tokens"], CONTRACT["longest"])
    with (
        brokering(lanes=lanes) as broker,
        serving(FAST, broker.address, contract=contract),
        operating(broker.address) as operator,
    ):
        with Client(broker.address, name="job") as client:
            assert sum(1 for _ in client.map(items, ordered=False)) == len(sent)
        at_once = operator.stats()
        until(lambda: operator.stats()["lanes_active"] == 0)
        status = operator.stats()
    said = [explain(each).verdict for each in (at_once, status)]
    assert said == [verdict, verdict], status["waste_tokens"]
    assert status["completed_items"] == len(sent) and status["lane_pressure_ratio"] == 0.0


def test_parts_add_up_to_the_padding(capacity: dict[str, Any]) -> None:
    said = explain(capacity)
    assert sum(part.tokens for part in said.parts) == said.padded_tokens - said.real_tokens
    assert sum(part.share for part in said.parts) == pytest.approx(1.0)
    assert {part.cause for part in said.parts} == set(Parts._fields) == set(CAUSES)
    assert all(part.meaning for part in said.parts)


VERDICTS = (
    "healthy", "capacity", "tolerance", "growth", "short prompts", "one noisy shape",
    "strict packing", "neighbours", "arrival order",
)  # fmt: skip


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_has_rule_advice_and_a_command_that_exists(
    capacity: dict[str, Any], verdict: str
) -> None:
    from zfabric.cli import build_parser

    said = explain({**capacity, "waste_verdict": verdict})
    assert said.rule and said.advice
    words = said.command.split()
    assert words[0] == "zfabric"
    build_parser().parse_args(words[1:])
    json.dumps(said.as_map(), allow_nan=False)


def test_one_noisy_shape_is_named_by_its_signature() -> None:
    bench = Bench(linger_ms=0, policy="shape")
    bench.tick()
    producer, card = bench.producer(), bench.worker(**CONTRACT)
    quiet, noisy = Shape.of("m", "quiet", tokens=[1]), Shape.of("m", "noisy", tokens=[1])
    chance = random.Random(2)
    producer.submit([1_600] * 6_400, quiet)
    producer.submit([chance.choice((80, 4_000)) for _ in range(320)], noisy)
    bench.settle()
    while bench.dispatch(1):
        for key in list(card.batches):
            card.done(key)
        card.heartbeat()
    status = {**bench.dispatcher.meta(bench.now), **bench.status()}
    assert status["waste_verdict"] == "one noisy shape"
    said = explain(status)
    assert said.command == f"zfabric lanes --shape {noisy.signature:016x}"


def test_low_waste_of_empty_batches_is_called_what_it_is(capacity: dict[str, Any]) -> None:
    status = {**capacity, "waste_verdict": "healthy", "batch_fill_ratio": 0.07}
    warning = explain(status).warning
    assert warning is not None and "7% full" in warning and "cost" in warning
    assert explain({**status, "batch_fill_ratio": 0.9}).warning is None


def test_verdict_on_the_first_batches_is_too_early_to_have_a_time() -> None:
    bench = Bench(linger_ms=0)
    bench.tick()
    producer, card = bench.producer(), bench.worker(**CONTRACT)
    producer.submit([100] * 40)
    bench.settle()
    bench.dispatch()
    card.done(next(iter(card.batches)))
    bench.tick(1.0)
    status = {**bench.dispatcher.meta(bench.now), **bench.status()}
    assert explain(status).since is None


def test_fabric_that_has_done_nothing_is_explained_too() -> None:
    bench = Bench()
    status = {**bench.dispatcher.meta(bench.now), **bench.status()}
    said = explain(status)
    assert "nothing has been handed out" in said.rule
    assert all(part.tokens == 0 == part.share for part in said.parts)


def test_dashboard_and_command_say_the_same(capacity: dict[str, Any]) -> None:
    import asyncio

    from zfabric.cli.explain import text

    day: Day = a_day()
    view = {**day.views[-1], **capacity, "shapes": []}

    async def draw() -> str:
        app = TopApp(FakeFeed([view]), ADDRESS, hz=0.001, clock=Clock())
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("w")
            return "\n".join(screen_of(app))

    shown, printed = asyncio.run(draw()), text(explain(capacity), capacity["time"])
    said = explain(capacity)
    for part in said.parts:
        assert f"{part.tokens:,}" in shown and f"{part.tokens:,}" in printed
    flowed = " ".join(shown.split())
    for words in (said.verdict, said.command, said.rule):
        assert words in flowed and words in printed


# -- what if --------------------------------------------------------------------------------------


def runs_of(lengths: list[int], per_s: float) -> list[Run]:
    last = len(lengths) - 1
    return [
        Run("m", "aa", (last - k) / per_s, lengths[k : k + 64]) for k in range(0, len(lengths), 64)
    ]


def test_more_lanes_would_end_the_capacity() -> None:
    runs = runs_of(trace()[:8_192], ITEMS_PER_S)
    few, many = (
        simulate(
            runs, lanes=lanes, packing="tight", contract=Contract(32, 65_536, 8_192),
            backlog_items=BACKLOG, accepted_items=8_192,
        )
        for lanes in (16, 2_048)
    )  # fmt: skip
    assert (few.verdict, many.verdict) == ("capacity", "healthy")
    assert few.waste_ratio > 3 * many.waste_ratio
    assert few.padding_tokens["forced"] > 0 == many.padding_tokens["forced"]


@pytest.mark.parametrize("lanes", [128, 2_048])
def test_simulation_of_what_there_is_fits_what_was_measured(lanes: int) -> None:
    measured = run_of(trace(), lanes=lanes)
    outcome = simulate(
        runs_of(trace(), ITEMS_PER_S), lanes=lanes, packing="group",
        contract=Contract(32, 65_536, 8_192), backlog_items=BACKLOG,
        accepted_items=measured["accepted_items"],
    )  # fmt: skip
    assert outcome.verdict == measured["waste_verdict"]
    assert outcome.waste_ratio == pytest.approx(measured["waste_ratio"], rel=0.15)
    assert outcome.cost_ratio == pytest.approx(measured["cost_ratio"], rel=0.02)


def test_sample_that_says_nothing_is_refused() -> None:
    from zfabric.errors import ConfigError

    runs = runs_of([100] * (SAMPLE_MIN - 1), 100.0)
    with pytest.raises(ConfigError, match="only 255 lengths"):
        simulate(
            runs, lanes=8, packing="tight", contract=Contract(8, 4_096, 1_024), backlog_items=10
        )
