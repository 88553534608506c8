"""The client's link: one thread that owns the socket and moves frames between it and a session.

Callers hold the lock while they touch the session, and wake the thread when they have added to it.
The thread keeps the clock and nothing else: every rule of the conversation is the session's, and
everything that happened goes to `on_news`. Times are seconds on the monotonic clock.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections.abc import Callable

import zmq

from zfabric.errors import PeerError
from zfabric.keys import ClientKey
from zfabric.session import News, Session
from zfabric.transport import Handshakes, Trouble, connect_watched, receive, send_out

# A thread that was this much later than it meant to be was stopped; the broker is not to blame.
LATE_S = 1.0
# Longest wait in poll.
TICK_S = 0.5
# Messages taken in one turn, so that heartbeats are sent whatever comes in.
RECEIVE_MESSAGES_MAX = 256
# The code of what a link that is not patient says where nothing listens.
UNREACHED = "unreached"
# How long a farewell may take to leave.
FAREWELL_MS = 500


class Link:
    """The thread. `on_news(news)` and `on_end()` run in it, `on_news` under the lock."""

    def __init__(
        self,
        address: str,
        session: Session,
        lock: threading.RLock,
        on_news: Callable[[News], None],
        on_end: Callable[[], None],
        key: ClientKey | None = None,
        *,
        patient: bool = True,
    ) -> None:
        self.address = address
        self.reconnects = 0
        # what speaks against a connection, where something does
        self.trouble: Trouble | None = None
        self._key = key
        self._patient = patient
        self._session = session
        self._lock = lock
        self._on_news = on_news
        self._on_end = on_end
        self._closing = False
        self._wake_r, self._wake_w = sockets.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._thread = threading.Thread(
            target=self._run, name=f"zfabric-{session.name}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the link's own thread, as the callbacks of futures do."""
        return threading.get_ident() == self._thread.ident

    def wake(self) -> None:
        """There is something to send. Never blocks, and does no harm after the end."""
        if self.is_here:
            # In the middle of a turn, which ends with sending.
            return
        # A full pipe or a closed one means that the thread has enough reasons to look.
        with contextlib.suppress(OSError):
            self._wake_w.send(b"\0")

    def close(self) -> None:
        """Ask the thread to say goodbye and end."""
        self._closing = True
        self.wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, after `close`; at once when called from it."""
        if threading.current_thread() is not self._thread:
            try:
                self._thread.join(timeout_s)
            except RuntimeError:
                # A signal came before it ran, or while it started: then it finds that it may go.
                self._close_pipe()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket, handshakes = connect_watched(context, self.address, self._key)
        with self._lock:
            self._session.open(time.monotonic())
        try:
            while not self._closing:
                again = self._step(socket)
                self._judge(handshakes)
                if again:
                    before = handshakes.trouble(self._key)
                    handshakes.close()
                    socket.close(0)
                    socket, handshakes = connect_watched(
                        context, self.address, self._key, before=before
                    )
                    with self._lock:
                        self.reconnects += 1
                        self._session.open(time.monotonic())
            with self._lock:
                self._session.leave()
                send_out(socket, self._session.outbound)
        finally:
            handshakes.close()
            socket.close(FAREWELL_MS)
            context.term()
            self._on_end()
            self._close_pipe()

    def _close_pipe(self) -> None:
        self._wake_r.close()
        self._wake_w.close()

    def _judge(self, handshakes: Handshakes) -> None:
        """Give up a connection that no further attempt can make."""
        with self._lock:
            self.trouble = None
            if self._session.state == "greeting":
                self.trouble = handshakes.trouble(self._key)
            if handshakes.unreached and not (self._patient or self._session.welcome):
                self._on_news(News(fatal=(UNREACHED, "nothing listens there")))
            if self.trouble is not None and self.trouble.code is not None:
                self._on_news(News(fatal=(self.trouble.code, self.trouble.text)))

    def _step(self, socket: zmq.Socket[bytes]) -> bool:
        """One turn; returns whether a new socket is needed."""
        started = time.monotonic()
        with self._lock:
            due = self._session.wake_at()
            writing = bool(self._session.outbound)
        wait_s = TICK_S if due is None else min(TICK_S, max(0.0, due - started))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN | zmq.POLLOUT if writing else zmq.POLLIN)
        poller.register(self._wake_r.fileno(), zmq.POLLIN)
        poller.poll(int(wait_s * 1000) + 1)
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass
        now = time.monotonic()
        with self._lock:
            if now - started > wait_s + LATE_S:
                self._session.shift(now - started - wait_s)
            self._receive(socket, now)
            news = self._session.tick(now)
            self._on_news(news)
            if not news.reconnect:
                send_out(socket, self._session.outbound)
            return news.reconnect

    def _receive(self, socket: zmq.Socket[bytes], now: float) -> None:
        for _ in range(RECEIVE_MESSAGES_MAX):
            frames = receive(socket)
            if frames is None:
                return
            try:
                news = self._session.receive(frames, now)
            except PeerError as error:
                news = News(fatal=(error.code, error.text))
                if error.code != "version_mismatch":
                    continue
            self._on_news(news)
