"""The broker: three sockets, one poll, one clock. The only loop, and the only code that sends.

With keys (`zap`) a fourth socket answers who may connect.

A turn of the loop: receive what is there, give the dispatcher the time, publish and acknowledge
what was stored, send what it left, hand out batches for at most one slice, publish statistics.
Every part of a turn is bounded, so that heartbeats are served whatever the load. Nothing is decided
here but what a failed send means: a channel that is full waits, every other error is a disconnect.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket as sockets
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

from zfabric import snapshot
from zfabric.access import PRODUCERS, STATS, WORKERS
from zfabric.addresses import format_address
from zfabric.config import BrokerConfig
from zfabric.dispatcher import Dispatcher
from zfabric.errors import ConfigError, NoSpace
from zfabric.files import FileBacking
from zfabric.osfiles import OsFiles
from zfabric.protocol import FRAME_SLACK_BYTES, Type
from zfabric.publishing import Publishing
from zfabric.recovery import Recovered, open_backing
from zfabric.restore import restore
from zfabric.store import Store
from zfabric.transport import DEAD_LINE_OPTIONS, frames_of, send
from zfabric.zap import Authenticator, key_of

# Small, so that a slow peer is noticed; never 0, which means without limit.
SEND_HWM = 128
RECEIVE_HWM = 64
SOCKET_BUFFER_BYTES = 256 * 1024
HANDSHAKE_IVL_MS = 5_000
# Connections that wait to be taken: with libzmq's 100 a crowd makes newcomers wait for seconds.
BACKLOG_CONNECTIONS = 4_096
# Longest wait in poll: judgement and upkeep are due this often even when nothing arrives.
TICK_S = 0.1
# Longest time spent receiving before everything else gets its turn.
RECEIVE_SLICE_S = 0.05
# After a drain the last words stay readable for this long: a peer whose connection closes drops
# what it has received but not read (ZMQ_IMMEDIATE), which lost a third of the replies to `drain`.
FAREWELL_S = 0.3
# While a full channel has messages waiting, look at it this often.
RETRY_S = 0.02
# Messages that may wait for one peer's full channel before it is given up as stalled.
STALLED_MESSAGES_MAX = 1_000
# Changes of subscription read in a turn.
CHANGES_MAX = 64
# Questions of other threads answered in a turn: each costs a status.
QUESTIONS_MAX = 4
# Upper bounds (s) of the histogram of slices: 100 ms is the limit by default.
SLICE_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
# A turn later than this was the machine's fault or a stop signal; deadlines of others move.
LATE_S = 0.5


class Endpoints(NamedTuple):
    """Where a bound broker can be reached."""

    producers: str
    workers: str
    stats: str


class Broker:
    """A broker on its own sockets. `bind`, then `run` in one thread until it is told to end."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store | None = None,
        *,
        rebuild_catalog: bool = False,
    ) -> None:
        self.config = config
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="zfabric-close")
        self.recovered: Recovered | None = None
        backing: FileBacking | None = None
        if store is None and config.data is not None:
            root = Path(config.data)
            files = OsFiles(root)
            backing, self.recovered = open_backing(
                root, config.durability, files, rebuild=rebuild_catalog
            )
            files.let_go = lambda descriptor: self._closer.submit(os.close, descriptor)
            backing.room.min_free_bytes = config.min_free
            backing.room.max_disk_bytes = config.max_disk
        self.dispatcher = Dispatcher(config, store or Store(backing), secrets.randbits(64))
        # The first events come before the first tick.
        self.dispatcher.fabric.wall_offset_s = time.time() - time.monotonic()
        self._backing = self.dispatcher.fabric.store.backing
        if backing is not None and self.recovered is not None:
            restore(self.dispatcher.fabric, backing, self.recovered, time.monotonic())
            self.dispatcher.recovery = snapshot.recovery(self.recovered)
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="zfabric-sync")
        self._sync: Future[None] | None = None
        self._sync_started_s = 0.0
        self._wake_r, self._wake_w = sockets.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        # an endpoint that nothing is taken from any more
        self._deaf_to: str | None = None
        self._stats: zmq.Socket[bytes] | None = None
        self._stalled: dict[tuple[str, bytes], deque[list[bytes]]] = {}
        # Not events: setting one takes a lock, which a second signal would wait for in the midst of
        # the first.
        self._drain_asked = self._stop_asked = False
        self.publishing = Publishing(self.dispatcher, config.hz)
        self._questions: deque[Future[dict[str, Any]]] = deque()
        self._slices = [0] * (len(SLICE_BOUNDS_S) + 1)
        # Called with each event in turn; must not block.
        self.on_event: Callable[[dict[str, Any]], None] | None = None
        self._slice_s = config.slice_ms / 1000
        self._more_offers = False
        self._turn_started_s: float | None = None
        self._waited_s = 0.0
        self.door: Authenticator | None = None
        if config.keys_directory is not None:
            try:
                gate = self.dispatcher.gate
                self.door = Authenticator(self._context, config.keys_directory, gate)
            except ConfigError:
                self.close()
                raise

    # -- life ---------------------------------------------------------------------------------

    def bind(self) -> Endpoints:
        """Bind the three sockets. Raises ConfigError where an address cannot be had."""
        wanted = dict(zip((PRODUCERS, WORKERS, STATS), self.config.ports, strict=True))
        bound: dict[str, str] = {}
        try:
            for name, port in wanted.items():
                socket = self._make(name)
                address = format_address(self.config.bind, port)
                try:
                    socket.bind(address if port else address.rsplit(":", 1)[0] + ":*")
                except zmq.ZMQError as error:
                    socket.close(0)
                    raise ConfigError(
                        f"cannot listen on {address} for {name}: {error.strerror}; is another "
                        "broker running there? --port 0 takes free ports"
                    ) from None
                bound[name] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                if name == STATS:
                    self._stats, self._stats_at = socket, bound[name]
                else:
                    self._sockets[name] = socket
        except ConfigError:
            self.close()
            raise
        port_of = {name: int(address.rsplit(":", 1)[1]) for name, address in bound.items()}
        self.dispatcher.ports = {"worker_port": port_of[WORKERS], "stats_port": port_of[STATS]}
        return Endpoints(bound[PRODUCERS], bound[WORKERS], bound[STATS])

    def _make(self, name: str) -> zmq.Socket[bytes]:
        routed = name != STATS
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER if routed else zmq.XPUB)
        if self.door is not None:
            self.door.secure(socket, name)
        if routed:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, self.config.payload_bytes_max + FRAME_SLACK_BYTES)
        else:
            socket.setsockopt(zmq.MAXMSGSIZE, FRAME_SLACK_BYTES)
        if ":" in self.config.bind:
            socket.setsockopt(zmq.IPV6, 1)
        for option, value in (
            (zmq.SNDHWM, SEND_HWM),
            (zmq.RCVHWM, RECEIVE_HWM),
            (zmq.SNDBUF, SOCKET_BUFFER_BYTES),
            (zmq.RCVBUF, SOCKET_BUFFER_BYTES),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_IVL_MS),
            (zmq.BACKLOG, BACKLOG_CONNECTIONS),
            *DEAD_LINE_OPTIONS,
            (zmq.LINGER, 0),
        ):
            socket.setsockopt(option, value)
        return socket

    def drain(self) -> None:
        """Ask for an orderly end; safe from any thread and from a signal handler."""
        self._drain_asked = True

    def stop(self) -> None:
        """Ask for an end now; safe from any thread and from a signal handler."""
        self._stop_asked = True

    def close(self) -> None:
        """Close every socket; what was not sent is dropped."""
        if self.door is not None:
            self.door.close()
        for socket in (*self._sockets.values(), self._stats):
            if socket is not None and not socket.closed:
                socket.close(0)
        self._context.term()
        self._syncer.shutdown()
        self._closer.shutdown()
        self._wake_r.close()
        self._wake_w.close()
        self._backing.close()

    def run(self) -> None:
        """Serve until drained or stopped. Raises InvariantError where going on would harm."""
        polled = [*self._sockets.values(), self._stats, self.door and self.door.waits_on]
        for socket in polled:
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_r.fileno(), zmq.POLLIN)
        try:
            self._serve(until=lambda: self.dispatcher.drained(time.monotonic()))
            self.dispatcher.farewell("the broker ends")
            # A worker dials again as soon as it reads that. What it held it has given up; let in
            # now, it would be lost again when the door closes.
            self._poller.unregister(self._sockets[WORKERS])
            self._deaf_to = WORKERS
            ends_s = time.monotonic() + FAREWELL_S
            self._serve(until=lambda: time.monotonic() >= ends_s)
            if not self._stop_asked:
                self._seal()
        finally:
            self.close()

    def _seal(self) -> None:
        """After a drain: nothing is promised any more, and all of it is durable."""
        if self._sync is not None:
            self._sync.exception()
            self._end_sync()
        with contextlib.suppress(NoSpace):
            self._backing.seal(unwritten=self.dispatcher.fabric.store.unwritten)

    def _serve(self, until: Callable[[], bool]) -> None:
        while not (self._stop_asked or until()):
            self._waited_s = self._wait_s(time.monotonic())
            ready = dict(self._poller.poll(math.ceil(self._waited_s * 1000)))
            if self._wake_r.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    while self._wake_r.recv(64):
                        pass
            self.turn()

    # -- one turn -----------------------------------------------------------------------------

    def _wait_s(self, now: float) -> float:
        if self._more_offers or self.dispatcher.busy:
            return 0.0
        until = [TICK_S]
        if self._stalled:
            until.append(RETRY_S)
        if self.dispatcher.wake_at is not None:
            until.append(self.dispatcher.wake_at - now)
        if self.publishing.next_s is not None:
            until.append(self.publishing.next_s - now)
        return max(0.0, min(until))

    def turn(self) -> None:
        """One turn of the loop, after a poll."""
        now = time.monotonic()
        if self._turn_started_s is not None:
            late_s = now - self._turn_started_s - self._waited_s
            if late_s > LATE_S:
                self.dispatcher.shift(late_s)
                self.dispatcher.fabric.event("broker_late", f"by {late_s:.1f} s", now)
        self._turn_started_s = now
        if self._drain_asked:
            self.dispatcher.drain(now)
        self._end_sync()
        if self.door is not None:
            self._mind_door(self.door, now)
        drained = self._receive(now)
        now = time.monotonic()
        self.dispatcher.tick(now, time.time(), drained=drained)
        self.dispatcher.flush(now)
        self._begin_sync()
        self._send_outgoing(now)
        self._hand_out()
        self._serve_stats(time.monotonic())

    def _begin_sync(self) -> None:
        """Let the other thread sync the window that is closed, if there is one."""
        if self._sync is None and self.dispatcher.sync_wanted:
            self._sync_started_s = time.monotonic()
            self._sync = self._syncer.submit(self._backing.sync)
            self._sync.add_done_callback(self._wake)

    def _wake(self, done: Future[None] | None = None) -> None:
        with contextlib.suppress(OSError):
            self._wake_w.send(b"\0")

    def _end_sync(self) -> None:
        """Keep what a finished sync allows. Raises StorageError where it failed: never retried."""
        if self._sync is None or not self._sync.done():
            return
        self._sync.result()
        self._sync = None
        gauges = self.dispatcher.gauges
        gauges["sync_s"] = time.monotonic() - self._sync_started_s
        gauges["sync_max_s"] = max(gauges["sync_s"], gauges.get("sync_max_s", 0.0))
        gauges["syncs_total"] = gauges.get("syncs_total", 0) + 1
        self.dispatcher.synced()

    def _receive(self, started_s: float) -> bool:
        """Take what has arrived, for one slice at most; returns whether all of it was taken."""
        drained, messages, count = True, 0, 0
        for endpoint, socket in self._sockets.items():
            if endpoint == self._deaf_to:
                continue
            if endpoint == PRODUCERS and self.dispatcher.writing:
                drained = False
                continue
            until = started_s + RECEIVE_SLICE_S
            while True:
                received = frames_of(socket)
                if not received:
                    break
                key = None if self.door is None else key_of(received[0])
                routing_id, *frames = [frame.bytes for frame in received]
                now = time.monotonic()
                messages += 1
                count += len(frames)
                self.dispatcher.receive(endpoint, routing_id, frames, now, key)
                if now > until:
                    drained = False
                    break
            started_s = time.monotonic()
        if messages:
            gauges = self.dispatcher.gauges
            gauges["messages_total"] = gauges.get("messages_total", 0) + messages
            gauges["frames_total"] = gauges.get("frames_total", 0) + count
        return drained

    def _mind_door(self, door: Authenticator, now: float) -> None:
        """Let in who may come in, and turn out whose key has ended."""
        door.turn(now)
        ended = door.look(now)
        if ended:
            self.dispatcher.turn_out(ended, now)
            # A subscriber only listens, so nothing of it could be refused: all of them come anew.
            if self._stats is not None:
                self._poller.unregister(self._stats)
                door.release(STATS)
                self._stats.close(0)
                self._stats = None
        if self._stats is None:
            self._bind_stats_again(door)

    def _bind_stats_again(self, door: Authenticator) -> None:
        """At the same place; while the former socket holds it, the next turn tries again."""
        socket = self._make(STATS)
        try:
            socket.bind(self._stats_at)
        except zmq.ZMQError:
            door.release(STATS)
            socket.close(0)
            return
        self._stats = socket
        self.publishing.nobody_watches()
        self._poller.register(socket, zmq.POLLIN)

    def _send_outgoing(self, now: float) -> None:
        for address in list(self._stalled):
            self._send_stalled(address, now)
        outgoing = self.dispatcher.outgoing
        while outgoing:
            parcel = outgoing.popleft()
            address = (parcel.endpoint, parcel.routing_id)
            waiting = self._stalled.get(address)
            if waiting is not None:
                self._wait_in_line(address, waiting, parcel.frames, now)
            elif not self._send(address, parcel.frames, now):
                self._stalled[address] = deque([parcel.frames])

    def _send_stalled(self, address: tuple[str, bytes], now: float) -> None:
        waiting = self._stalled[address]
        while waiting:
            if not self._send(address, waiting[0], now):
                return
            waiting.popleft()
        del self._stalled[address]

    def _wait_in_line(
        self,
        address: tuple[str, bytes],
        waiting: deque[list[bytes]],
        frames: list[bytes],
        now: float,
    ) -> None:
        if frames[0][3] == Type.HEARTBEAT:
            return
        waiting.append(frames)
        if len(waiting) > STALLED_MESSAGES_MAX:
            del self._stalled[address]
            self.dispatcher.unreachable(*address, "its channel has been full for too long", now)

    def _send(self, address: tuple[str, bytes], frames: list[bytes], now: float) -> bool:
        """Send, or find the peer gone; False only where its channel is full."""
        endpoint, routing_id = address
        try:
            send(self._sockets[endpoint], [routing_id, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self.dispatcher.unreachable(endpoint, routing_id, str(error.strerror).lower(), now)
        return True

    def _hand_out(self) -> None:
        """Send offers until there are none or the slice is over; commit each that was taken."""
        started_s = now = time.monotonic()
        self._more_offers = handed_out = False
        while (offer := self.dispatcher.next_offer(now)) is not None:
            peer = offer.worker.peer
            if peer is None:
                continue
            if peer.address in self._stalled:
                self.dispatcher.refused(offer)
                continue
            try:
                send(self._sockets[WORKERS], [peer.routing_id, *offer.frames])
            except zmq.Again:
                self.dispatcher.refused(offer)
            except zmq.ZMQError as error:
                self.dispatcher.unreachable(*peer.address, str(error.strerror).lower(), now)
            else:
                self.dispatcher.commit(offer, now)
                handed_out = True
            now = time.monotonic()
            if now - started_s > self._slice_s:
                self._more_offers = True
                self.dispatcher.fabric.count("dispatch_yields")
                break
        gauges = self.dispatcher.gauges
        slice_s = now - started_s
        gauges["dispatch_slice_max_s"] = max(gauges.get("dispatch_slice_max_s", 0.0), slice_s)
        if handed_out:
            self._slices[bisect_left(SLICE_BOUNDS_S, slice_s)] += 1
            gauges["dispatch_slices_s"] = gauges.get("dispatch_slices_s", 0.0) + slice_s
            gauges["dispatch_slice_buckets"] = list(
                zip((*SLICE_BOUNDS_S, None), self._slices, strict=True)
            )

    # -- statistics ---------------------------------------------------------------------------

    def ask(self, timeout_s: float) -> dict[str, Any]:
        """What a snapshot says, from any other thread. Raises TimeoutError."""
        answer: Future[dict[str, Any]] = Future()
        self._questions.append(answer)
        self._wake()
        try:
            return answer.result(timeout_s)
        finally:
            answer.cancel()

    def _serve_stats(self, now: float) -> None:
        for _ in range(min(len(self._questions), QUESTIONS_MAX)):
            answer = self._questions.popleft()
            if answer.set_running_or_notify_cancel():
                answer.set_result(self.publishing.view(now))
        if self.on_event is not None:
            for event in self.dispatcher.fabric.fresh_events:
                self.on_event(event)
        stats = self._stats
        if stats is None:
            return
        for _ in range(CHANGES_MAX):
            try:
                self.publishing.changed(stats.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        for topic, value in self.publishing.messages(now):
            self._publish(stats, topic, value)

    @staticmethod
    def _publish(stats: zmq.Socket[bytes], topic: bytes, value: object) -> None:
        # XPUB drops for a subscriber that does not keep up; it never blocks.
        stats.send_multipart([topic, msgpack.packb(value)], zmq.NOBLOCK)
