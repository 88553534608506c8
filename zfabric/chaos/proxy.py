"""A TCP proxy that does to a link what networks do: cut, reset, half open, late, corrupt.

It listens on another loopback address at the ports of the real broker, so that ports that peers are
told of lead through it too. One thread; times are seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

HOST = "127.0.0.2"
CHUNK_BYTES = 65_536
# SO_LINGER on with no time: a close is a reset.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """A proxy for the ports of one broker. What it does is changed while it runs."""

    def __init__(self, ports: Sequence[int], seed: int) -> None:
        self._ports = ports
        self._chance = random.Random(seed)
        # Longest time that a chunk is held back.
        self.delay_s = 0.0
        # Take no connection and pass nothing on.
        self.cut = False
        # Pass nothing to the broker, or nothing from it, and say nothing: a link that went one way.
        self.silent_up = self.silent_down = False
        # A chunk of so many is sent twice, which no peer can make sense of; 0 is none.
        self.repeat_one_of = 0
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10.0)

    async def _listen(self) -> None:
        self._servers = [
            await asyncio.start_server(self._taker(port), HOST, port) for port in self._ports
        ]

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        await self._break_links(reset=False)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def break_links(self, *, reset: bool) -> None:
        """End every connection that is open now, by a reset or in order."""
        self._do(self._break_links(reset=reset))

    async def _break_links(self, *, reset: bool) -> None:
        for pair in list(self._links):
            for writer in pair:
                sock = writer.get_extra_info("socket")
                if reset and sock is not None:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
        self._links.clear()

    def _taker(self, port: int) -> Any:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.cut:
                writer.transport.abort()
                return
            try:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.transport.abort()
                return
            pair = (writer, up_writer)
            self._links.add(pair)
            try:
                # Streams complain of a handler that was cancelled, as this one is at the end.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(
                        self._pump(reader, up_writer, up=True),
                        self._pump(up_reader, writer, up=False),
                    )
            finally:
                self._links.discard(pair)
                for each in pair:
                    each.transport.abort()

        return take

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while chunk := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self._chance.uniform(0.0, self.delay_s))
                if self.cut or (self.silent_up if up else self.silent_down):
                    continue
                writer.write(chunk)
                if self.repeat_one_of and not self._chance.randrange(self.repeat_one_of):
                    writer.write(chunk)
                await writer.drain()
        writer.transport.abort()
