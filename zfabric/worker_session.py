"""A worker's side of the conversation, without a socket: what it holds, says and is told.

    closed --open--> greeting --WELCOME--> live --WHO_ARE_YOU--> greeting
      ^------------------ silence, BYE ------+

A result is kept until the broker has acknowledged it, and sent again on every new connection. A
batch that was given back is kept too, and named as held, until the broker says (by REVOKE) that
it knows: otherwise an engine's death that happens while the connection is down would charge
nobody. Batch ids are the broker's and mean nothing to its successor, so what an earlier broker
sent is never named to this one; its results are, by the references of its items.

The shell moves frames, keeps the clock and runs the engine. Times are seconds on the caller's
monotonic clock, lengths tokens, sizes bytes. Nothing is ever started that was taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zfabric.access import PASSING_CODES, REFUSAL_CODES
from zfabric.engine import Batch, Status
from zfabric.holding import FINISHED, READY, RETURNED, RUNNING, Ended, Held, cut, take
from zfabric.protocol import (
    FRAME_SLACK_BYTES,
    FROM_BROKER,
    WINDOW_MAX,
    Frame,
    Message,
    Type,
    decode,
    encode,
)
from zfabric.shapes import Contract

# HELLO is said again when there is no WELCOME after this long.
GREETING_S = 1.0
# HELLO refused for a cause that may pass: the old holder of the name may be dead already.
REFUSED_RETRY_S = 0.5
# A broker that says nothing for this long, or three of its heartbeats, is gone.
SILENT_S, SILENT_HEARTBEATS = 5.0, 3.0
# Where WELCOME does not say.
HEARTBEAT_DEFAULT_S, LEASE_DEFAULT_S = 1.0, 10.0
# The broker's limit of a payload where it names none.
PAYLOAD_DEFAULT_BYTES = 1024 * 1024
# Remarks in RETURNED; the wire takes 8 KiB.
TEXT_CHARS_MAX = 1_000

CLOSED, GREETING, LIVE = "closed", "greeting", "live"


@dataclass(slots=True)
class News:
    """What happened in one step, for the shell to act on."""

    welcomed: bool = False
    # the broker is another process than before: what was not started has been dropped
    restarted: bool = False
    # (code, text) of what the broker refused
    errors: list[tuple[str, str]] = field(default_factory=list)
    # an error that no further attempt can cure
    fatal: tuple[str, str] | None = None
    # the shell must close its socket, find the broker anew and open
    reconnect: bool = False


@dataclass(slots=True)
class Done:
    """Results of one batch on their way: sent on this connection, not acknowledged."""

    held: Held
    ended: Ended


class WorkerSession:
    """A worker's conversation with the broker. `serial` numbers name batches to the shell."""

    def __init__(
        self,
        name: str,
        instance: int,
        *,
        model: str,
        contract: Contract,
        window: int = 2,
        engine: str = "custom",
        simulated: bool = False,
    ) -> None:
        # Fixed.
        self._hello = {
            "role": "worker",
            "name": name,
            "instance": instance,
            "model": model,
            "batch_items_max": contract.batch_items_max,
            "batch_tokens_max": contract.batch_tokens_max,
            "input_tokens_max": contract.input_tokens_max,
            "ragged": contract.ragged,
            "window": window,
            "engine": engine,
            "simulated": simulated,
        }
        self._window = window
        self._input_tokens_max = contract.input_tokens_max
        # As long as the process.
        self._held: dict[int, Held] = {}
        # those of them that wait to be started, and those of which the broker may have to hear
        self._ready: dict[int, Held] = {}
        self._unsaid: dict[int, Held] = {}
        self._next_serial = 1
        self._serving = False
        self._stats: dict[str, Any] = {}
        self.leaving = False
        self.boot: int | None = None
        # One connection.
        self.state = CLOSED
        self.outbound: deque[list[bytes]] = deque()
        self.welcome: dict[str, Any] = {}
        self._dones: deque[Done] = deque()
        self._received = 0
        self._window_told = 0
        self._heartbeat_s = HEARTBEAT_DEFAULT_S
        self._silent_s = SILENT_S
        self._heard_s = 0.0
        self._greet_at = 0.0
        self._next_beat_s = 0.0

    # -- what the shell asks and says ---------------------------------------------------------

    @property
    def window_wanted(self) -> int:
        """Batches to be granted now: none unless the engine can take one."""
        return self._window if self._serving and not self.leaving else 0

    @property
    def settled(self) -> bool:
        """Nothing runs and every result is with the broker."""
        return not any(h.phase in (RUNNING, FINISHED) for h in self._held.values())

    @property
    def running(self) -> bool:
        """Whether a started batch still lacks results."""
        return any(h.phase == RUNNING for h in self._held.values())

    @property
    def ready(self) -> bool:
        """Whether `start` would give a batch."""
        return self.state == LIVE and bool(self._ready)

    def serve(self, serving: bool, stats: Mapping[str, Any]) -> None:
        """Whether the engine can take batches, and what to tell of it; `tick` says so."""
        self._serving = serving
        self._stats = dict(stats)

    def start(self) -> tuple[int, Batch] | None:
        """The next batch to run and its serial, or None. Send what is outbound before it runs.

        Only while live: what is not started belongs to the broker again when a link breaks.
        """
        if not self.ready:
            return None
        held = self._ready.pop(next(iter(self._ready)))
        held.phase, held.started = RUNNING, True
        self.outbound.append(held.started_frames())
        return held.serial, held.batch

    def report(
        self,
        serial: int,
        indices: Sequence[int],
        statuses: Sequence[Status],
        payloads: Sequence[bytes],
        *,
        final: bool,
    ) -> None:
        """Results of a running batch, by index in what `start` gave; `tick` sends them together.

        `final`: the engine is done with the batch. Raises ValueError where the columns differ in
        length.
        """
        if not len(indices) == len(statuses) == len(payloads):
            raise ValueError("a report's columns differ in length")
        held = self._held.get(serial)
        if held is None or held.phase != RUNNING:
            return
        places = [held.places[k] for k in indices]
        held.fresh.extend(places, statuses, payloads)
        self._unsaid[serial] = held
        if final:
            self._end(held)
        else:
            held.answered.update(places)

    def give_back(self, serial: int, kind: str, text: str) -> None:
        """Items of this batch without a result go back to the broker; `kind` says who is to blame.

        See `protocol.RETURN_KINDS`.
        """
        held = self._held.get(serial)
        if held is None or held.phase not in (READY, RUNNING):
            return
        if len(held.answered) == len(held.places) or not self._is_named(held):
            self._end(held)
            return
        self._ready.pop(serial, None)
        held.phase, held.kind, held.text = RETURNED, kind, text[:TEXT_CHARS_MAX]
        self._unsaid[serial] = held

    def give_back_ready(self, kind: str, text: str) -> None:
        """Give back every batch that was not started."""
        for serial in list(self._ready):
            self.give_back(serial, kind, text)

    def drain(self) -> None:
        """Take nothing more and give back what was not started."""
        self.leaving = True
        self.give_back_ready("leaving", "the worker leaves")

    def leave(self, reason: str) -> None:
        """Give back everything, say goodbye, close. `settled` before, no work is lost by it."""
        self.drain()
        for held in [h for h in self._held.values() if h.phase == RUNNING]:
            self.give_back(held.serial, "leaving", reason)
        if self.state == LIVE:
            self._pump()
            self.outbound.append(encode(Type.BYE, {"reason": reason[:TEXT_CHARS_MAX]}))
        self.state = CLOSED

    # -- connection ---------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """The shell has a fresh socket to the workers' endpoint."""
        self._heard_s = now
        self._greet(now)

    def _greet(self, now: float) -> None:
        self.state = GREETING
        self.outbound.clear()
        self._greet_at = now + GREETING_S
        hello: dict[str, Any] = dict(self._hello)
        if self.boot is not None:
            hello |= {"boot": self.boot, "held": self._named(lambda held: True)}
        self.outbound.append(encode(Type.HELLO, hello))

    def _close(self, news: News) -> None:
        self.state = CLOSED
        self.outbound.clear()
        news.reconnect = True

    def tick(self, now: float) -> News:
        """Heartbeats, results, retries, and the judgement of a silent broker. Receive first."""
        news = News()
        if self.state == CLOSED:
            return news
        if now - self._heard_s > self._silent_s:
            self._close(news)
        elif self.state == GREETING:
            if now >= self._greet_at:
                self._greet(now)
        else:
            # First what is wanted: a batch that is given back must not be granted here again.
            if now >= self._next_beat_s or self.window_wanted != self._window_told:
                self._beat(now)
            self._pump()
        return news

    def shift(self, late_s: float, now: float) -> None:
        """This side was late by so much; the broker is not to be judged for it.

        After a whole lease the broker may have given to others what is ready here: it is asked
        before any of that is started.
        """
        self._heard_s += late_s
        if self.state == LIVE and late_s >= self._told_s("lease_s", LEASE_DEFAULT_S):
            self._greet(now)

    def wake_at(self) -> float | None:
        """When `tick` has something to do next if nothing happens, or None."""
        if self.state == CLOSED:
            return None
        due = self._greet_at if self.state == GREETING else self._next_beat_s
        return min(due, self._heard_s + self._silent_s)

    def _told_s(self, name: str, default_s: float) -> float:
        told = self.welcome.get(name)
        return float(told) if isinstance(told, int | float) and told >= 0.01 else default_s

    # -- messages in --------------------------------------------------------------------------

    def receive(self, frames: Sequence[Frame], now: float) -> News:
        """One message from the broker. Raises PeerError for one that is not the protocol."""
        news = News()
        message = decode(frames, FROM_BROKER)
        if self.state == CLOSED:
            return news
        self._heard_s = now
        kind, fields = message.kind, message.fields
        if kind is Type.WELCOME:
            self._on_welcome(fields, news, now)
        elif kind is Type.WHO_ARE_YOU:
            if self.state == LIVE:
                self._greet(now)
        elif kind is Type.ERROR:
            self._on_error(fields["code"], fields["text"], news, now)
        elif kind is Type.BYE:
            self._close(news)
        elif kind is Type.REVOKE:
            self._on_revoke((fields["epoch"], fields["n"]), message.columns["indices"])
        elif self.state == LIVE and kind is Type.BATCH:
            self._on_batch(message)
        elif self.state == LIVE and kind is Type.DONE_ACK:
            self._on_done_ack((fields["epoch"], fields["n"]))
        return news

    def _on_welcome(self, fields: dict[str, Any], news: News, now: float) -> None:
        news.welcomed = True
        news.restarted = self.boot is not None and self.boot != fields["boot"]
        self.boot = fields["boot"]
        self.welcome = fields
        self._heartbeat_s = self._told_s("heartbeat_s", HEARTBEAT_DEFAULT_S)
        self._silent_s = max(SILENT_S, SILENT_HEARTBEATS * self._heartbeat_s)
        self._received = 0
        for held in list(self._held.values()):
            if held.boot != self.boot and held.phase in (READY, RETURNED):
                self._end(held)
        # A WELCOME while live answers a HELLO that was said twice. All that was sent since the
        # first one was sent after both HELLOs: none of it is lost.
        if self.state == GREETING:
            self.state = LIVE
            self._unsend()
        self._beat(now)
        self._pump()

    def _unsend(self) -> None:
        """Nothing that was said on an earlier connection counts as heard."""
        while self._dones:
            done = self._dones.pop()
            later = done.held.fresh
            done.ended.extend(later.places, later.statuses, later.payloads)
            done.held.fresh = done.ended
            done.held.unacked = 0
        self._unsaid.update(self._held)

    def _on_error(self, code: str, text: str, news: News, now: float) -> None:
        news.errors.append((code, text))
        if code == "version_mismatch" or code in REFUSAL_CODES:
            news.fatal = (code, text)
        elif self.state == GREETING:
            if code in PASSING_CODES:
                self._greet_at = now + REFUSED_RETRY_S
            else:
                news.fatal = (code, text)

    def _on_batch(self, message: Message) -> None:
        epoch, n = message.fields["epoch"], message.fields["n"]
        if epoch != self.welcome["epoch"] or self.boot is None:
            # On its way while HELLO was: HELLO did not name it, so the broker has it again.
            return
        held = take(message, self._next_serial, self.boot, self._input_tokens_max)
        self._next_serial += 1
        self._received = max(self._received, n)
        self._held[held.serial] = self._ready[held.serial] = self._unsaid[held.serial] = held
        if not held.places:
            self._end(held)
        elif self.leaving:
            self.give_back(held.serial, "leaving", "the worker leaves")

    def _on_done_ack(self, batch_id: tuple[int, int]) -> None:
        # Acknowledgements come in the order of the DONEs, so the first of that id is meant, even
        # where an earlier broker has used the id too.
        for k, done in enumerate(self._dones):
            if done.held.id == batch_id:
                del self._dones[k]
                done.held.unacked -= 1
                self._retire(done.held)
                return

    def _on_revoke(self, batch_id: tuple[int, int], indices: Sequence[int]) -> None:
        held = next(
            (h for h in self._held.values() if h.id == batch_id and self._is_named(h)), None
        )
        if held is None:
            return
        if held.phase == READY and len(indices):
            held.drop_items(set(indices))
            if held.places:
                return
        if held.phase == READY or held.phase == RETURNED:
            self._end(held)
        if not len(indices):
            held.revoked = True

    # -- messages out -------------------------------------------------------------------------

    def _is_named(self, held: Held) -> bool:
        """Whether the broker of now knows this batch by its id and has not taken it back."""
        return held.boot == self.boot and not held.revoked

    def _named(self, which: Callable[[Held], bool]) -> list[list[int]]:
        chosen = [list(h.id) for h in self._held.values() if self._is_named(h) and which(h)]
        return chosen[-4 * WINDOW_MAX :]

    def _beat(self, now: float) -> None:
        self._next_beat_s = now + self._heartbeat_s
        self._window_told = self.window_wanted
        fields = {
            "received": self._received,
            "holding": self._named(lambda held: True),
            "started": self._named(lambda held: held.started),
            "window": self._window_told,
            "stats": self._stats,
        }
        self.outbound.append(encode(Type.HEARTBEAT, fields))

    def _pump(self) -> None:
        """Send results, then what is given back of the same batches."""
        if self.state != LIVE or not self._unsaid:
            return
        for held in self._unsaid.values():
            if held.fresh:
                self._send_results(held)
            if held.phase == RETURNED:
                self.outbound.append(held.returned_frames())
        self._unsaid.clear()

    def _send_results(self, held: Held) -> None:
        told = self.welcome.get("payload_bytes_max", PAYLOAD_DEFAULT_BYTES)
        parts = list(cut(held.fresh, told + FRAME_SLACK_BYTES))
        held.fresh = Ended([], [], [])
        for k, part in enumerate(parts, 1):
            last = held.phase == FINISHED and k == len(parts)
            self.outbound.append(held.done_frames(part, self._stats if last else None))
            self._dones.append(Done(held, part))
            held.unacked += 1

    # -- endings ------------------------------------------------------------------------------

    def _end(self, held: Held) -> None:
        """Nothing more comes of this batch; it is kept while results of it are unacknowledged."""
        self._ready.pop(held.serial, None)
        held.phase = FINISHED
        self._retire(held)

    def _retire(self, held: Held) -> None:
        if held.spent:
            self._held.pop(held.serial, None)
