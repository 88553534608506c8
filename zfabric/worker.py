"""The worker's runtime: a supervisor that speaks with the broker while its engine works elsewhere.

    engine:  loading --Loaded--> serving --Exited--> restarting --backoff--> loading
                                   +--EngineUnreachable--> unreachable --backoff--> serving

One loop in the caller's thread owns the sockets, the clock and the engine's process; every rule of
the conversation is in `worker_session`, the process itself in `engine_child`. Decided here: what
an engine's failure means for the batch it had, when a new engine is started, and how a worker
leaves. An engine that blocks, dies or holds the interpreter never delays this loop.

One batch runs in the engine, or more where the engine says that it has room beside it; the others
that the window allows are ready in memory. The workers' port is asked of the broker before every
connection, since it may change. Times are seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket as sockets
import time

import zmq

from zfabric.access import TOO_MANY_HANDSHAKES
from zfabric.addresses import format_address, parse_address
from zfabric.config import ClientConfig
from zfabric.connection import Key, server_key
from zfabric.engine import EngineFactory
from zfabric.engine_child import EngineChild, Exited, Failed, Loaded, Results
from zfabric.enginecare import Backoff, CacheCount
from zfabric.errors import (
    ConfigError,
    ConnectError,
    FabricError,
    InvariantError,
    PeerError,
    ProtocolError,
    TooManyHandshakes,
    VersionMismatch,
)
from zfabric.keys import client_key
from zfabric.protocol import WINDOW_MAX
from zfabric.refusals import for_good, so_far
from zfabric.session import News as PortNews
from zfabric.session import Session
from zfabric.shapes import Contract, check_name
from zfabric.transport import Handshakes, Trouble, connect_watched, receive, send_out
from zfabric.worker_session import LIVE, News, WorkerSession
from zfabric.worklog import say

# Loads that fail in a row before the worker gives up: by then 7.5 s and five loads have gone by.
FAILED_LOADS_MAX = 5
# Longest wait of one turn.
TURN_S = 0.5
# Messages taken in one turn; a window's worth of batches is far fewer.
MESSAGES_PER_TURN = 256
# A turn later than this was the machine's fault or a stop signal; the broker is not judged for it.
LATE_S = 1.0
# A worker that leaves waits this long for a broker that could take its last results.
LEAVE_S = 10.0
# Time for an engine to close by itself.
ENGINE_CLOSE_S = 5.0


class Worker:
    """Serves one model with one engine until it is stopped.

    `factory` makes the engine in its own process: a class or function of a module, or a
    functools.partial of one. `broker` is the producers' address (ZFABRIC_BROKER, or the default).
    `timeout_s` bounds the wait for the first answer of a broker, and the wait for a name that
    another worker holds; a connection that is lost later is sought for ever. `key` is the file of
    the key to connect with (ZFABRIC_KEY), and then the workers' port is `broker_port`, or the one
    behind the address's. Raises ConfigError for arguments out of range.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        broker: str | None = None,
        model: str,
        contract: Contract,
        name: str | None = None,
        window: int = 2,
        engine: str = "custom",
        simulated: bool = False,
        timeout_s: float = 10.0,
        key: Key = None,
        broker_port: int | None = None,
    ) -> None:
        told = broker or os.environ.get("ZFABRIC_BROKER") or ClientConfig().broker
        self._host, port = parse_address(told)
        self.address = format_address(self._host, port)
        self._key = client_key(key or os.environ.get("ZFABRIC_KEY") or None, server_key())
        # A worker's key may not ask where the workers' port is.
        self._port = broker_port or (port + 1 if self._key is not None else None)
        self.name = check_name(name or f"{sockets.gethostname()}-{os.getpid()}", "worker name")
        self._say = functools.partial(say, logging.getLogger(__name__), worker=self.name)
        check_name(model, "model name")
        check_name(engine, "engine label")
        if type(window) is not int or not 1 <= window <= WINDOW_MAX:
            raise ConfigError(f"window must be 1 to {WINDOW_MAX} batches, not {window!r}")
        self._timeout_s = timeout_s
        self._session = WorkerSession(
            self.name,
            secrets.randbits(64),
            model=model,
            contract=contract,
            window=window,
            engine=engine,
            simulated=simulated,
        )
        # The engine.
        self._child = EngineChild(factory, f"engine-{self.name}"[:60])
        self._loaded, self._load_error, self._failed_loads = False, "", 0
        self._restarts, self._pauses = Backoff(), Backoff()
        self._restart_at: float | None = None
        self._resume_at: float | None = None
        self._cache = CacheCount()
        # The connection.
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link: zmq.Socket[bytes] | None = None
        self._handshakes: Handshakes | None = None
        self._asking: Session | None = None
        self._met = False
        self._refusal: tuple[float, str, str] | None = None
        # what the broker last refused, so that a refusal that goes on is said once
        self._said: tuple[str, str] | None = None
        self._workers_at: str | None = None
        # The loop.
        self._began_s = self._woke_s = self._waited_s = 0.0
        # How often the end was asked for, and by when a worker that leaves has to be gone.
        self._stops = 0
        self._leave_by: float | None = None
        self._wake_w: sockets.socket | None = None

    # -- what others may ask, from any thread ---------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the broker has greeted this worker on its present connection."""
        return self._session.state == LIVE

    @property
    def engine_pid(self) -> int | None:
        """The process of the engine, while there is one."""
        return self._child.pid

    @property
    def state(self) -> str:
        """What the broker is told: loading, idle, running, restarting, unreachable or leaving."""
        if self._session.leaving:
            return "leaving"
        if self._restart_at is not None:
            return "restarting"
        if not self._loaded:
            return "loading"
        if self._resume_at is not None:
            return "unreachable"
        return "running" if self._child.busy else "idle"

    def stop(self, drain: bool = True) -> None:
        """Ask for the end; safe from any thread and from a signal handler, and it does not wait.

        With `drain` the running batch is finished and the others go back; asked again, or without
        `drain`, everything goes back at once.
        """
        self._stops = self._stops + 1 if drain else 2
        wake = self._wake_w
        if wake is not None:
            # A full pipe or a closed one means that the loop has enough reasons to look.
            with contextlib.suppress(OSError):
                wake.send(b"\0")

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`; blocks. Once per Worker.

        Raises NotAllowed where its key is refused, ConnectError or NameInUse after `timeout_s`,
        ConfigError for a contract that the broker refuses or a factory that cannot be sent to a
        process, VersionMismatch, and FabricError when the engine fails to load time and again.
        """
        if self._context is not None:
            raise InvariantError("a Worker runs once; make another one")
        self._context = zmq.Context()
        wake_r, self._wake_w = sockets.socketpair()
        wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._began_s = self._woke_s = time.monotonic()
        try:
            self._start_engine(self._began_s)
            self._dial(self._began_s)
            while not self._ended(time.monotonic()):
                self._turn(wake_r)
        finally:
            self._close(self._context)
            wake_r.close()
            self._wake_w.close()

    def _turn(self, wake_r: sockets.socket) -> None:
        self._wait(wake_r)
        now = time.monotonic()
        late_s = now - self._woke_s - self._waited_s
        self._woke_s = now
        if late_s > LATE_S:
            self._session.shift(late_s, now)
            if self._asking is not None:
                self._asking.shift(late_s)
        self._receive(now)
        self._hear_engine(now)
        self._mind_engine(now)
        if self._stops and not self._session.leaving:
            self._session.drain()
        self._tell(now)
        self._feed()
        self._flush()

    def _wait(self, wake_r: sockets.socket) -> None:
        now = time.monotonic()
        talk = self._asking or self._session
        due = [now + TURN_S, talk.wake_at(), self._restart_at, self._resume_at]
        wait_s = max(0.0, min(t for t in due if t is not None) - now)
        poller = zmq.Poller()
        poller.register(wake_r.fileno(), zmq.POLLIN)
        for descriptor in self._child.waitables():
            poller.register(descriptor, zmq.POLLIN)
        if self._link is not None:
            poller.register(self._link, zmq.POLLIN | (zmq.POLLOUT if talk.outbound else 0))
        self._waited_s = wait_s
        poller.poll(int(wait_s * 1000) + 1)
        with contextlib.suppress(BlockingIOError):
            while wake_r.recv(4096):
                pass

    def _ended(self, now: float) -> bool:
        """Whether to leave now. Raises what makes going on pointless."""
        if self._stops >= 2:
            return True
        if self._refusal is not None:
            since, code, text = self._refusal
            if now - since > self._timeout_s:
                raise so_far(code, text, self.address)
        elif not self._met and now - self._began_s > self._timeout_s:
            trouble = self._trouble()
            kind = TooManyHandshakes if trouble is not None and trouble.later else ConnectError
            raise kind(self._unanswered(trouble))
        if not self._session.leaving or self._session.running:
            return False
        if self._session.settled:
            return True
        self._leave_by = self._leave_by or now + LEAVE_S
        return now > self._leave_by

    def _unanswered(self, trouble: Trouble | None) -> str:
        """Where an answer was sought, and none came in time."""
        if trouble is not None:
            return f"{self._workers_at or self.address}: {trouble.text}"
        if self._port is not None:
            return (
                f"no broker answered at its port for workers {self._workers_at} within "
                f"{self._timeout_s:g} s; --broker-port names another port"
            )
        if self._workers_at is not None:
            return (
                f"the broker at {self.address} answered, its port for workers {self._workers_at} "
                f"did not within {self._timeout_s:g} s; is that port open to this machine?"
            )
        return (
            f"no broker answered at {self.address} within {self._timeout_s:g} s; start one "
            "with `zfabric broker`, or name another with --broker or ZFABRIC_BROKER"
        )

    def _close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        polite = not self._session.running
        if not polite:
            self._child.kill()
        self._session.leave("stopped")
        if self._asking is None:
            self._flush()
        self._hang_up()
        self._child.stop(ENGINE_CLOSE_S if polite and self._loaded else 0)
        context.term()

    # -- the connection -------------------------------------------------------------------------

    def _connect(self, address: str) -> None:
        if self._context is None:
            raise InvariantError("the worker does not run")
        before = self._trouble()
        self._hang_up()
        self._link, self._handshakes = connect_watched(
            self._context, address, self._key, before=before
        )

    def _trouble(self) -> Trouble | None:
        """What speaks against a connection, or spoke against the last one."""
        return self._handshakes.trouble(self._key) if self._handshakes is not None else None

    def _hang_up(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _dial(self, now: float) -> None:
        """Ask the broker, as an operator, where its workers connect; or go there."""
        if self._port is not None:
            self._connect_workers(self._port, now)
            return
        self._connect(self.address)
        self._asking = Session(self.name, secrets.randbits(64), "operator")
        self._asking.open(now)

    def _receive(self, now: float) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if self._link is None:
                return
            frames = receive(self._link)
            if frames is None:
                return
            try:
                if self._asking is not None:
                    self._on_port(self._asking, self._asking.receive(frames, now), now)
                else:
                    self._on_news(self._session.receive(frames, now), now)
            except PeerError as error:
                if error.code == "version_mismatch":
                    raise VersionMismatch(f"{self.address}: {error.text}") from None
                self._say("message_dropped", f"a message of the broker was dropped: {error.text}")

    def _on_port(self, asking: Session, news: PortNews, now: float) -> None:
        if news.fatal is not None:
            self._give_up(*news.fatal)
        if news.reconnect:
            self._dial(now)
        if not news.welcomed:
            return
        port = asking.welcome.get("worker_port")
        if port is None:
            raise ProtocolError(f"the broker at {self.address} names no port for workers")
        asking.leave("found the workers' port")
        self._flush()
        self._asking = None
        self._connect_workers(port, now)

    def _connect_workers(self, port: int, now: float) -> None:
        self._workers_at = format_address(self._host, port)
        self._connect(self._workers_at)
        self._session.open(now)

    def _on_news(self, news: News, now: float) -> None:
        if news.fatal is not None:
            self._give_up(*news.fatal)
        for code, text in news.errors:
            self._say_refused(code, text)
            if not self.connected and self._refusal is None:
                self._refusal = (now, code, text)
        if news.welcomed:
            self._met, self._refusal, self._said = True, None, None
            self._say("broker_connected", f"connected to {self.address}")
        if news.reconnect:
            trouble = self._trouble()
            if trouble is None or not trouble.later:
                self._say("broker_lost", f"the broker at {self.address} went away")
            self._dial(now)

    def _say_refused(self, code: str, text: str) -> None:
        """Once, for as long as it goes on."""
        if (code, text) != self._said:
            self._said = code, text
            self._say("broker_refused", f"the broker refused: {code}: {text}", code=code)

    def _give_up(self, code: str, text: str) -> None:
        raise for_good(code, f"the broker at {self.address} refuses {self.name}: {code}: {text}")

    def _tell(self, now: float) -> None:
        greeted = self._asking is None and self.connected
        trouble = None if greeted else self._trouble()
        if trouble is not None and trouble.code is not None:
            self._give_up(trouble.code, trouble.text)
        if trouble is not None and trouble.later:
            self._say_refused(TOO_MANY_HANDSHAKES, trouble.text)
        serving = self._loaded and self._resume_at is None
        stats = {"state": self.state, "pid": self._child.pid, **self._cache.fields()}
        self._session.serve(serving, stats)
        if self._asking is not None:
            self._on_port(self._asking, self._asking.tick(now), now)
        else:
            self._on_news(self._session.tick(now), now)

    def _flush(self) -> None:
        if self._link is not None:
            send_out(self._link, (self._asking or self._session).outbound)

    # -- the engine -----------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give an idle engine its next batch, after STARTED is on its way.

        A socket that can be written to takes one more message, so STARTED is never left behind.
        """
        if not self._child.idle or self._resume_at is not None or not self._session.ready:
            return
        self._flush()
        if self._session.outbound or self._link is None:
            return
        if not int(self._link.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return
        chosen = self._session.start()
        if chosen is not None:
            self._flush()
            self._child.send(*chosen)

    def _hear_engine(self, now: float) -> None:
        for event in self._child.receive():
            if isinstance(event, Results):
                columns = event.indices, event.statuses, event.payloads
                self._session.report(event.batch_id, *columns, final=event.final)
                if event.final:
                    self._restarts.reset()
                    self._pauses.reset()
            elif isinstance(event, Loaded):
                self._loaded, self._failed_loads = True, 0
                self._say("engine_loaded", "the engine is loaded")
            elif isinstance(event, Failed):
                self._on_failed(event, now)
            elif isinstance(event, Exited):
                self._on_exit(event, now)
            else:
                self._cache.note(event.stats)

    def _on_failed(self, failed: Failed, now: float) -> None:
        if failed.batch_id is None:
            if failed.kind == "config":
                # Another load would find the same.
                raise ConfigError(f"the engine of {self.name} cannot be loaded: {failed.text}")
            self._load_error = failed.text
            return
        self._say("batch_failed", f"a batch failed: {failed.kind}: {failed.text}", kind=failed.kind)
        kind = "engine_error" if failed.kind == "error" else failed.kind
        self._session.give_back(failed.batch_id, kind, failed.text)
        if failed.kind == "unreachable":
            self._resume_at = now + self._pauses.take()

    def _on_exit(self, exited: Exited, now: float) -> None:
        self._say("engine_exited", f"the engine {exited.text}")
        for batch_id in exited.batch_ids:
            self._session.give_back(batch_id, "engine_exit", exited.text)
        if not self._loaded:
            self._failed_loads += 1
            text = self._load_error or f"it {exited.text} while loading"
            if self._failed_loads >= FAILED_LOADS_MAX:
                raise FabricError(
                    f"the engine of {self.name} could not be loaded {self._failed_loads} times in "
                    f"a row; the last time: {text}"
                )
        self._loaded, self._load_error, self._resume_at = False, "", None
        self._cache.begin()
        self._restart_at = now + self._restarts.take()

    def _start_engine(self, now: float) -> None:
        try:
            self._child.start()
        except OSError as error:
            # No descriptor, no memory or no process is left: that may pass.
            self._on_exit(Exited(1, f"could not be started: {error.strerror}", ()), now)

    def _mind_engine(self, now: float) -> None:
        """Start a new engine, or try one that could not be reached, when the time has come.

        Until then batches that wait are better off with somebody else; only after the first exit
        of an engine that worked do they stay.
        """
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
        if self._restart_at is not None and now >= self._restart_at and not self._session.leaving:
            self._restart_at = None
            self._start_engine(now)
        if self._resume_at is not None or self._failed_loads:
            self._session.give_back_ready("unreachable", "the engine cannot be reached")
