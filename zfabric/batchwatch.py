"""Watching a batch run: whether its work is still at the broker, and whether anybody does it.

A run waits for rows that others make. `Watch` decides when waiting is in vain: the broker has
another store or has forgotten the job (`Gone`: send it again), no worker serves a model, none can
reach its server, or the broker's disk is full (say so, and what to do),
nothing has come for as long as the caller would wait (TimeoutExpired). `Meter` says how fast rows
come. Times are seconds on the monotonic clock, given by the caller.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zfabric.errors import TimeoutExpired
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.client import Client

CHECK_S = 1.0
# Only when no result has come for this long is the broker asked what it still has.
QUIET_S = 2.0
ASK_TIMEOUT_S = 2.0
# A model without a worker is worth a word after this long, and again later.
NO_WORKER_S, REMIND_S = 5.0, 60.0
# The work is gone when the broker had none of it in so many checks in a row,
GONE_CHECKS = 3
# or had only results that it does not send.
STUCK_CHECKS = 15
RATE_WINDOW_S = 10.0


class Gone(Exception):
    """The broker no longer holds what it took of this job."""


class Watch:
    """The judgement of one job at one broker, made once a second."""

    def __init__(
        self,
        client: Client,
        now: float,
        notice: Callable[[str], None],
        *,
        stall_timeout_s: float | None,
        wait_for_workers: bool,
        why: Callable[[float], str | None] | None = None,
    ) -> None:
        self._client = client
        self._why = why
        self._notice = notice
        self._stall_timeout_s = stall_timeout_s
        self._wait_for_workers = wait_for_workers
        self._store = client.welcome["store"]
        self._upto = client.accepted_upto
        self._due_s = now + CHECK_S
        self._models_due_s = now + NO_WORKER_S
        self._began_s = self._connected_s = now
        self._said: dict[str, float] = {}
        self._gone_checks = self._stuck_checks = 0

    def check(
        self, now: float, heard_s: float, open_of: Mapping[str, int], *, settled: bool
    ) -> None:
        """Judge, if it is time to. `open_of` counts open items by model.

        `heard_s` is when the last result came; `settled` says that everything which was sent has
        been accepted, and everything that came acknowledged. Raises Gone or TimeoutExpired.
        """
        if now < self._due_s:
            return
        self._due_s = now + CHECK_S
        client = self._client
        if client.welcome["store"] != self._store:
            raise Gone("the broker came back with another store")
        upto = client.accepted_upto
        if upto < self._upto:
            raise Gone("the broker has forgotten this job")
        self._upto = upto
        if self._stall_timeout_s is not None and now - heard_s > self._stall_timeout_s:
            raise TimeoutExpired(f"no result for {self._stall_timeout_s:g} s")
        if not client.connected:
            if now - self._connected_s > NO_WORKER_S:
                self._say(now, f"the broker at {client.address} does not answer; still trying")
            return
        self._connected_s = now
        if not open_of:
            return
        if now - heard_s > QUIET_S and settled:
            self._check_gone()
        else:
            self._gone_checks = self._stuck_checks = 0
        if now >= self._models_due_s:
            self._models_due_s = now + NO_WORKER_S
            self._check_workers(now, heard_s, open_of)

    def _ask(self, op: str) -> Any:
        """The broker's answer, or None where it does not come in time."""
        with contextlib.suppress(TimeoutExpired):
            return self._client.request(op, ASK_TIMEOUT_S)
        return None

    def _books(self) -> tuple[int, int] | None:
        """(items that have not ended, results not acknowledged) of this job; None if unknown."""
        rows = self._ask("producers.ls")
        row = next((r for r in rows or () if r["name"] == self._client.name), None)
        if row is None:
            return None
        waiting = row["outbox_items"]
        held = row["accepted_items"] + row["refused_items"] - row["acked_items"] - waiting
        return held, waiting

    def retrying(self, now: float, in_hand: int) -> bool:
        """Whether the broker still has something of a job whose lines have all ended once.

        Then dead ones were requeued. `in_hand` results have come and are not yet acknowledged.
        """
        books = self._books() if self._client.connected else None
        if books is None:
            return False
        held, waiting = books
        if held > 0 and self._wait_for_workers:
            self._say(now, f"waiting for {counted(held, 'dead item')} requeued")
            return True
        return waiting > in_hand

    def _check_gone(self) -> None:
        books = self._books()
        if books is None:
            return
        held, waiting = books
        self._gone_checks = self._gone_checks + 1 if held <= 0 and not waiting else 0
        self._stuck_checks = self._stuck_checks + 1 if held <= 0 and waiting else 0
        if self._gone_checks >= GONE_CHECKS or self._stuck_checks >= STUCK_CHECKS:
            raise Gone("the broker has nothing left of what it took")

    def _check_workers(self, now: float, heard_s: float, open_of: Mapping[str, int]) -> None:
        status = self._ask("status")
        if status is None:
            return
        rows = {row["model"]: row for row in status["models"]}
        served = sorted(name for name, row in rows.items() if row["workers"])
        unserved = [name for name in open_of if name not in served]
        for name in unserved:
            others = "workers serve " + ", ".join(served) if served else "there are no workers"
            self._say(
                now,
                f"no worker serves model {name!r}; {others}. Start one (zfabric worker --model), "
                "or run again with --resume --model",
            )
        for name in open_of:
            if name in rows and rows[name]["paused"]:
                self._say(now, f"model {name!r} is paused; zfabric resume starts it again")
        self._check_stuck(now, heard_s, status)
        idle = len(unserved) == len(open_of) and now - heard_s >= NO_WORKER_S
        if idle and not self._wait_for_workers:
            raise TimeoutExpired(f"no worker serves {', '.join(map(repr, unserved[:5]))}")

    def _check_stuck(self, now: float, heard_s: float, status: Any) -> None:
        """Say what keeps everything from going on, when nothing has come for a while."""
        if status["storage"]["full"]:
            self._say(
                now,
                "the disk of the broker is full: it takes nothing until there is room; free some "
                "there (zfabric status shows how much it uses, and may)",
            )
        quiet_s = now - max(heard_s, self._began_s)
        if quiet_s < NO_WORKER_S:
            return
        why = None if self._why is None else self._why(quiet_s)
        states = {row["name"]: row["state"] for row in status["workers"] if row["live"]}
        if why is None and states and set(states.values()) == {"unreachable"}:
            why = f"{', '.join(sorted(states)[:5])}: see what the log of the worker says"
        if why is not None:
            self._say(
                now,
                f"nothing is run, the server of the engine cannot be used; still trying. {why}. "
                "Set it right there, or end this run and go on with --resume and another --url or "
                "key",
            )

    def _say(self, now: float, text: str) -> None:
        """Say it, but not again for a while."""
        if now - self._said.get(text, -REMIND_S) >= REMIND_S:
            self._said[text] = now
            self._notice(text)
        while len(self._said) > 100:
            del self._said[next(iter(self._said))]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. `total` is None until known, `total_exact` once the input has been read."""

    done: int
    failed: int
    open: int
    total: int | None
    total_exact: bool
    items_per_s: float
    output_tokens: int | None
    output_tokens_per_s: float | None
    eta_s: float | None
    seconds: float


class Meter:
    """Rates over the last ten seconds, of counters that only grow."""

    def __init__(self, now: float) -> None:
        self._started_s = now
        self._points: deque[tuple[float, int, int]] = deque()

    def progress(
        self,
        now: float,
        rows: int,
        tokens: int | None,
        *,
        done: int,
        failed: int,
        open: int,
        total: int | None,
        total_exact: bool,
    ) -> Progress:
        """Note the counters of this run (`rows`, output `tokens`), and say how far it is."""
        points = self._points
        points.append((now, rows, tokens or 0))
        while now - points[0][0] > RATE_WINDOW_S and len(points) > 2:
            points.popleft()
        seconds = now - points[0][0]
        rate = (rows - points[0][1]) / seconds if seconds > 0 else 0.0
        tokens_rate = ((tokens or 0) - points[0][2]) / seconds if seconds > 0 else 0.0
        left = None if total is None else max(0, total - done)
        return Progress(
            done=done,
            failed=failed,
            open=open,
            total=total,
            total_exact=total_exact,
            items_per_s=rate,
            output_tokens=tokens,
            output_tokens_per_s=None if tokens is None else tokens_rate,
            eta_s=left / rate if left is not None and rate > 0 else None,
            seconds=now - self._started_s,
        )
