"""Play one scenario: a fresh fabric, a load, the fault again and again, and the judge's word.

Times are seconds. What went wrong while a fault was done is as much a failure as what the judge
finds; it never ends the other scenarios.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zfabric.addresses import format_address
from zfabric.chaos import judge
from zfabric.chaos.load import MODEL, Load
from zfabric.chaos.peers import Crowd, Rogue
from zfabric.chaos.proxy import HOST, Proxy
from zfabric.chaos.remote import Keys, Remote, Tidying, ask
from zfabric.chaos.stage import Stage
from zfabric.errors import FabricError, TooManyConnections, TooManyHandshakes
from zfabric.processes import Processes, wait_for

# Items of one round of a scenario that does not say otherwise, some seconds of work.
ROUND_ITEMS = 400
WARM_ITEMS = 60
# Everything must be over this long after a fault.
FINISH_S = 90.0
SETTLE_S = 10.0
NO_KEYS = Keys()


def expect(holds: bool, what: str) -> None:
    """Raises FabricError where something is not as it must be."""
    if not holds:
        raise FabricError(what)


def pause(seconds: float) -> None:
    """Let a fault last."""
    threading.Event().wait(seconds)


@dataclass
class Run:
    """What a scenario gets to work with."""

    fabric: Stage | Remote
    load: Load
    chance: random.Random
    processes: Processes
    directory: Path
    # in front of every name that this run uses
    mark: str
    model: str
    cycles: int
    # all that were at work so far
    crowds: list[Crowd]
    proxy: Proxy | None = None
    recovered_s: list[float] = field(default_factory=list)

    @property
    def stage(self) -> Stage:
        """The fabric that was started for this run, to which anything may be done."""
        if isinstance(self.fabric, Remote):
            raise FabricError("this is not done to a fabric of somebody else's")
        return self.fabric

    @property
    def link(self) -> Proxy:
        """The link of this run."""
        if self.proxy is None:
            raise FabricError("this scenario has no link of its own")
        return self.proxy

    def ask(self, op: str, **args: Any) -> Any:
        """One question to the broker. Raises FabricError."""
        return ask(self.fabric.address, self.fabric.keys.operator, op, **args)

    @contextlib.contextmanager
    def producing(self, name: str, model: str) -> Iterator[Load]:
        """Another producer; its name gets the run's mark."""
        key = self.fabric.keys.producer
        load = Load(self.fabric.address, f"{self.mark}-{name}", self.chance, model=model, key=key)
        try:
            yield load
        finally:
            load.close()

    def crowd(self, count: int, model: str, *, window: int = 2) -> Crowd:
        """Many workers."""
        fabric = self.fabric
        crowd = Crowd(fabric.workers_address, count, model, fabric.keys.worker, window=window)
        self.crowds.append(crowd)
        return crowd

    def rogue(self) -> Rogue:
        """A worker that says what it likes."""
        return Rogue(self.fabric.workers_address, self.fabric.keys.worker)

    def status(self) -> dict[str, Any]:
        """What `zfabric status --json` prints."""
        found: dict[str, Any] = self.ask("status")
        return found

    def progress(self, items: int) -> None:
        """Let so many more results come, as far as there are any to come."""
        left = len(self.load.seen.lost)
        self.load.await_results(self.load.results + min(items, left), FINISH_S)

    def recovers(self) -> None:
        """The fault is over: note how long the next result takes to come."""
        if not self.load.seen.lost:
            return
        began = time.monotonic()
        self.load.await_results(self.load.results + 1, FINISH_S)
        self.recovered_s.append(time.monotonic() - began)

    def disconnects(self) -> int:
        """How often workers of this run's model were lost so far."""
        rows = self.ask("workers")
        return sum(row["disconnects"] for row in rows if row["model"] == self.model)


@dataclass(frozen=True)
class Scenario:
    """A fault: what is done, which of the listed faults it is, and what it is done to."""

    name: str
    faults: tuple[int, ...]
    summary: str
    act: Callable[[Run], None]
    items: int = ROUND_ITEMS
    # options of the engine of each worker
    engine: Sequence[str] = ()
    broker: Sequence[str] = ()
    # the workers are a crowd of our own, for a model of its own: also on a fabric of others
    crowd: int = 0
    linked: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether it may be done to a fabric that serves others."""
        return self.crowd > 0


@dataclass
class Report:
    """One row of the table."""

    scenario: str
    faults: tuple[int, ...]
    tries: int = 0
    items: int = 0
    recovered_median_s: float | None = None
    recovered_worst_s: float | None = None
    lost: int = 0
    visible_twice: int = 0
    residual_items: int = 0
    # of the broker's process, after warming up and when everybody had gone; None where it was
    # another one by then, or somebody else's
    rss_before_bytes: int | None = None
    rss_after_bytes: int | None = None
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    # the limit of somebody else's fabric that kept the fault from being done
    inconclusive: str | None = None
    # names of this run that could not be taken off the lists of somebody else's fabric
    left: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """BROKEN where an invariant broke, inconclusive where that could not be tried, or held."""
        if self.broken:
            return "BROKEN"
        return "held" if self.inconclusive is None else "inconclusive"


def play(
    scenario: Scenario,
    directory: Path,
    *,
    seed: int,
    seconds: float = 0.0,
    cycles: int = 300,
    against: str | None = None,
    keys: Keys = NO_KEYS,
    report: Report | None = None,
) -> Report:
    """Do the fault once, and again until `seconds` are over; what fails is in the report.

    `against` is the address of somebody else's fabric, `keys` are those for it; what a signal
    leaves there is in `report`, too. A SystemExit in its midst ends it and everything that it has
    made; there must be no second one.
    """
    began = time.monotonic()
    report = Report(scenario.name, scenario.faults) if report is None else report
    chance = random.Random(f"{scenario.name} {seed}")
    # Not drawn from the seed: another run may be at work on the same fabric.
    mark = f"chaos-{secrets.token_hex(6)}"
    tidying = Tidying(mark)
    crowds: list[Crowd] = []
    try:
        with contextlib.ExitStack() as stack:
            processes = stack.enter_context(Processes())
            try:
                fabric: Stage | Remote
                if against is not None:
                    fabric = tidying.remote = Remote(against, keys)
                    stack.callback(tidying.finish)
                else:
                    fabric = Stage(processes, directory, scenario.broker)
                    fabric.start_broker()
                run = _set(
                    stack, scenario, fabric, processes, directory, chance, cycles, mark, crowds
                )
                _rounds(run, scenario, report, began + seconds)
            except (FabricError, TimeoutError, OSError, LookupError) as error:
                _blame(report, error, crowds if against is not None else None)
    finally:
        # Again where a signal came while names were taken off the lists.
        tidying.finish()
        report.left = tidying.left
    report.seconds = time.monotonic() - began
    return report


def _blame(report: Report, error: Exception, crowds: Sequence[Crowd] | None) -> None:
    """Whether an error broke the fabric, or a limit of somebody else's did its work.

    `crowds` were at work there; None is a fabric of our own, which has no limits.
    """
    limit: Exception | None = None
    if isinstance(error, TooManyConnections | TooManyHandshakes):
        limit = error
    elif isinstance(error, TimeoutError):
        # Who should have done it in time was not let in.
        limit = next((crowd.kept_out for crowd in crowds or () if crowd.kept_out), None)
    if crowds is not None and limit is not None:
        report.inconclusive = str(limit)
    else:
        report.broken.append(f"{type(error).__name__}: {error}")


def _set(
    stack: contextlib.ExitStack,
    scenario: Scenario,
    fabric: Stage | Remote,
    processes: Processes,
    directory: Path,
    chance: random.Random,
    cycles: int,
    mark: str,
    crowds: list[Crowd],
) -> Run:
    """The fabric's workers and the load, ready; `crowds` gets the workers that are one."""
    proxy = None
    model = MODEL if isinstance(fabric, Stage) else mark
    address = fabric.address
    if scenario.linked:
        proxy = stack.enter_context(Proxy(fabric.ports, chance.getrandbits(32)))
        address = format_address(HOST, fabric.ports[0])
    if scenario.crowd:
        crowd = Crowd(fabric.workers_address, scenario.crowd, model, fabric.keys.worker)
        crowds.append(crowd)
        stack.enter_context(crowd)
    elif isinstance(fabric, Stage):
        for k in range(2):
            fabric.start_worker(f"gpu{k}", *scenario.engine, address=address)
        fabric.await_workers(2)
    load = Load(address, mark, chance, model=model, key=fabric.keys.producer)
    stack.callback(load.close)
    return Run(fabric, load, chance, processes, directory, mark, model, cycles, crowds, proxy)


def _rounds(run: Run, scenario: Scenario, report: Report, until_s: float) -> None:
    run.load.submit(WARM_ITEMS)
    run.load.await_end(FINISH_S)
    stage = run.fabric if isinstance(run.fabric, Stage) else None
    before = stage.used() if stage is not None else None
    pid = stage.broker.pid if stage is not None and stage.broker is not None else None
    try:
        while not report.tries or time.monotonic() < until_s:
            if scenario.items:
                run.load.submit(scenario.items)
            scenario.act(run)
            run.load.await_end(FINISH_S)
            report.tries += 1
    finally:
        seen = run.load.seen
        report.items = len(seen.payloads)
        report.lost, report.visible_twice = len(seen.lost), len(seen.twice)
        report.recovered_median_s, report.recovered_worst_s = judge.summary(run.recovered_s)
    run.load.close()
    status = run.status()
    report.residual_items = status["residual_items"]
    report.broken += judge.broken(seen, status)
    same = stage is not None and stage.broker is not None and stage.broker.pid == pid
    if stage is not None and before is not None and same:
        report.broken += _leaks(stage, before)
        report.rss_before_bytes = before.rss_bytes
        report.rss_after_bytes = stage.used().rss_bytes


def _leaks(stage: Stage, before: Any) -> list[str]:
    """What the broker keeps once everybody has had time to go."""
    with contextlib.suppress(TimeoutError):
        wait_for("rest", lambda: not judge.leaks(before, stage.used()), SETTLE_S)
    return judge.leaks(before, stage.used())
