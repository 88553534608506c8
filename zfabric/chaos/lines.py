"""Lines: the connections of chaos peers, which dial again while the broker's limits keep them out.

A broker with keys lets a user have so many connections, and make them at a pace; whoever comes
beyond it is told to come later. That is what it promises, and breaks nothing: a peer waits and
tries on for a bounded time, and then says which limit it was. Times are seconds.
"""

from __future__ import annotations

import threading
import time

import zmq

from zfabric.access import TOO_MANY_CONNECTIONS
from zfabric.errors import NotAllowed, TimeoutExpired, TooManyConnections, TooManyHandshakes
from zfabric.keys import ClientKey
from zfabric.protocol import Message, Type
from zfabric.transport import Handshakes, Trouble, connect_dealer, connect_watched

ANSWER_S = 10.0
# How long a peer tries on: a user's pace has room for all its connections again after 10 s.
TRY_S = 30.0
# As long as our clients wait between two dials, and between two HELLOs.
DIAL_AGAIN_S, HELLO_AGAIN_S = 5.0, 0.5
# Refusals of HELLO that are a limit's.
LIMITS = frozenset({TOO_MANY_CONNECTIONS, "too_many_peers"})


def wait(seconds: float) -> None:
    """Let time pass."""
    threading.Event().wait(seconds)


class Line:
    """One connection to `address`. Its socket is another one after every `dial`.

    Only one that is `watched` knows what became of its handshakes; that takes descriptors.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        key: ClientKey | None,
        *,
        linger_ms: int = 0,
        watched: bool = True,
    ) -> None:
        self.address = address
        self._context = context
        self._key = key
        self._linger_ms = linger_ms
        self._watched = watched
        self.dial()

    def dial(self) -> None:
        """Connect, the first time or anew."""
        context, address, key, linger_ms = self._context, self.address, self._key, self._linger_ms
        self._handshakes: Handshakes | None = None
        if self._watched:
            self.socket, self._handshakes = connect_watched(
                context, address, key, linger_ms=linger_ms
            )
        else:
            self.socket = connect_dealer(context, address, key, linger_ms=linger_ms)

    def trouble(self) -> Trouble | None:
        """What speaks against the connection, as far as that is known."""
        return self._handshakes.trouble(self._key) if self._handshakes is not None else None

    def close(self, linger_ms: int = 0) -> None:
        """Hang up; once is enough, and more does no harm."""
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        self.socket.close(linger_ms)

    def await_open(self) -> None:
        """Wait until the broker has let it in, dialling again where that is to be later.

        Raises NotAllowed where the key is refused, TooManyHandshakes after TRY_S, and
        TimeoutExpired where nobody answers for ANSWER_S.
        """
        until = time.monotonic() + TRY_S
        answer_by = time.monotonic() + ANSWER_S
        # It may be written to once it is let in.
        while not self.socket.poll(100, zmq.POLLOUT):
            trouble = self.trouble()
            if trouble is not None and trouble.code is not None:
                raise NotAllowed(f"{self.address}: {trouble.code}: {trouble.text}")
            if trouble is not None and trouble.later:
                if time.monotonic() > until:
                    raise TooManyHandshakes(f"{self.address}: {trouble.text}")
                wait(DIAL_AGAIN_S)
                self.close()
                self.dial()
                answer_by = time.monotonic() + ANSWER_S
            elif time.monotonic() > answer_by:
                raise TimeoutExpired(f"no connection to {self.address} within {ANSWER_S:g} s")


def limit_in(message: Message) -> TooManyConnections | None:
    """The limit by which a HELLO was refused, where this message says so."""
    if message.kind is Type.ERROR and message.fields["code"] in LIMITS:
        return TooManyConnections(f"{message.fields['code']}: {message.fields['text']}")
    return None
