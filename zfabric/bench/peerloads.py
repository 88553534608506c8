"""Both ends of a peer's benchmark, a process each: `python -m zfabric.bench.peerloads ROLE JSON`.

What a careful user of each system would write: many items a round trip, every item acknowledged
once it has been read, a backlog that the producer keeps up. A producer prints "full" when it is
there, a consumer how many items it has acknowledged, now and then, a number a line. Sizes are
bytes. Clients are optional: the extra `peers`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

STREAM, GROUP = "bench", "workers"
# Where results go back, in the loads that return them; of so many bytes, as our worker's.
RESULTS, PRODUCERS, RESULT_BYTES = "results", "producers", 8
# Items that a producer sends before it waits for the answers, and that a consumer has at once: as
# many as our workers (a window of 8 batches of 32).
PUBLISH_ITEMS, CONSUME_ITEMS = 256, 256
ACK_ITEMS = 32
# A producer that finds the backlog full looks again after this long.
PAUSE_S = 0.005
SAY_S = 0.1

ENDING = threading.Event()


class Backlog:
    """Says "full", once, when the backlog is there."""

    def __init__(self, items: int) -> None:
        self._items, self._said = items, False

    def is_full(self, held: int) -> bool:
        """Whether so many held are enough."""
        if held < self._items:
            return False
        if not self._said:
            self._said = True
            sys.stdout.write("full\n")
            sys.stdout.flush()
        return True


class Tally:
    """Says how many items have been acknowledged."""

    def __init__(self) -> None:
        self._items, self._said_s = 0, 0.0

    def add(self, items: int) -> None:
        """So many more."""
        self._items += items
        now = time.monotonic()
        if now - self._said_s >= SAY_S:
            self._said_s = now
            sys.stdout.write(f"{self._items}\n")
            sys.stdout.flush()


# -- Redis Streams --------------------------------------------------------------------------------


def redis_produce(port: int, size: int, backlog: int) -> None:
    """XADD in pipelines; what is acknowledged is deleted, so that the length is the backlog."""
    import redis

    server, payload, wanted = redis.Redis(port=port), os.urandom(size), Backlog(backlog)
    while not ENDING.is_set():
        if wanted.is_full(server.xlen(STREAM)):
            time.sleep(PAUSE_S)
            continue
        pipe = server.pipeline(transaction=False)
        for _ in range(PUBLISH_ITEMS):
            pipe.xadd(STREAM, {"p": payload})
        pipe.execute()


def redis_consume(port: int, name: str) -> None:
    """XREADGROUP, then XACK and XDEL of all that was read."""
    _redis_consume(port, name, None)


def redis_answer(port: int, name: str) -> None:
    """The same, with a result for each item before that."""
    _redis_consume(port, name, os.urandom(RESULT_BYTES))


def _redis_consume(port: int, name: str, result: bytes | None) -> None:
    import redis

    server, tally = redis.Redis(port=port), Tally()
    while not ENDING.is_set():
        found = server.xreadgroup(GROUP, name, {STREAM: ">"}, count=CONSUME_ITEMS, block=100)
        if not found:
            continue
        ids = [entry for entry, fields in found[0][1] if fields[b"p"]]
        pipe = server.pipeline(transaction=False)
        for entry in ids if result is not None else ():
            pipe.xadd(RESULTS, {"of": entry, "r": result})
        pipe.xack(STREAM, GROUP, *ids)
        pipe.xdel(STREAM, *ids)
        pipe.execute()
        tally.add(len(ids))


def redis_produce_and_read(port: int, size: int, backlog: int) -> None:
    """The same, and a thread that reads results and deletes what it has acknowledged."""
    reader = threading.Thread(target=_redis_read_results, args=(port,), daemon=True)
    reader.start()
    redis_produce(port, size, backlog)


def _redis_read_results(port: int) -> None:
    import redis

    server = redis.Redis(port=port)
    server.xgroup_create(RESULTS, PRODUCERS, id="0", mkstream=True)
    while not ENDING.is_set():
        found = server.xreadgroup(PRODUCERS, "p", {RESULTS: ">"}, count=PUBLISH_ITEMS, block=100)
        if found:
            ids = [entry for entry, fields in found[0][1] if fields[b"r"]]
            pipe = server.pipeline(transaction=False)
            pipe.xack(RESULTS, PRODUCERS, *ids)
            pipe.xdel(RESULTS, *ids)
            pipe.execute()


# -- NATS JetStream -------------------------------------------------------------------------------


def nats_produce(port: int, size: int, backlog: int) -> None:
    """Publish with acknowledgements, many at a time."""
    asyncio.run(_nats_produce(port, os.urandom(size), backlog))


async def _nats_produce(port: int, payload: bytes, backlog: int) -> None:
    import nats

    connection = await nats.connect(f"nats://127.0.0.1:{port}")
    stream, wanted = connection.jetstream(), Backlog(backlog)
    while not ENDING.is_set():
        held = (await stream.stream_info(STREAM)).state.messages
        if wanted.is_full(held):
            await asyncio.sleep(PAUSE_S)
            continue
        await asyncio.gather(*(stream.publish(STREAM, payload) for _ in range(PUBLISH_ITEMS)))
    await connection.close()


def nats_consume(port: int, name: str) -> None:
    """Pull batches of a shared durable consumer and acknowledge each message."""
    asyncio.run(_nats_consume(port))


async def _nats_consume(port: int) -> None:
    import nats

    connection, tally = await nats.connect(f"nats://127.0.0.1:{port}"), Tally()
    pull = await connection.jetstream().pull_subscribe(STREAM, GROUP)
    while not ENDING.is_set():
        try:
            messages = await pull.fetch(CONSUME_ITEMS, timeout=0.5)
        except nats.errors.TimeoutError:
            continue
        for message in messages:
            await message.ack()
        tally.add(len(messages))
    await connection.close()


# -- RabbitMQ -------------------------------------------------------------------------------------


def rabbit_produce(port: int, size: int, backlog: int) -> None:
    """Publish persistent messages with confirms, many between two waits."""
    asyncio.run(_rabbit_produce(port, os.urandom(size), backlog))


async def _rabbit_produce(port: int, payload: bytes, backlog: int) -> None:
    import aio_pika

    connection = await aio_pika.connect(port=port)
    channel = await connection.channel(publisher_confirms=True)
    queue = await channel.get_queue(STREAM)
    wanted = Backlog(backlog)
    message = aio_pika.Message(payload, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    while not ENDING.is_set():
        held = (await channel.declare_queue(STREAM, passive=True)).declaration_result.message_count
        if wanted.is_full(held or 0):
            await asyncio.sleep(PAUSE_S)
            continue
        sends = (
            channel.default_exchange.publish(message, queue.name) for _ in range(PUBLISH_ITEMS)
        )
        await asyncio.gather(*sends)
    await connection.close()


def rabbit_consume(port: int, name: str) -> None:
    """Consume with a prefetch, acknowledge 32 at a time."""
    asyncio.run(_rabbit_consume(port))


async def _rabbit_consume(port: int) -> None:
    import aio_pika

    connection, tally = await aio_pika.connect(port=port), Tally()
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=CONSUME_ITEMS)
    queue = await channel.get_queue(STREAM)
    held = 0
    async with queue.iterator() as messages:
        async for message in messages:
            held += 1
            if held == ACK_ITEMS:
                await message.ack(multiple=True)
                tally.add(held)
                held = 0
            if ENDING.is_set():
                break


ROLES: dict[str, Callable[..., None]] = {
    "redis-produce": redis_produce,
    "redis-consume": redis_consume,
    "redis-results-produce": redis_produce_and_read,
    "redis-results-consume": redis_answer,
    "nats-produce": nats_produce,
    "nats-consume": nats_consume,
    "rabbitmq-produce": rabbit_produce,
    "rabbitmq-consume": rabbit_consume,
}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: ENDING.set())
    told: dict[str, Any] = json.loads(sys.argv[2])
    ROLES[sys.argv[1]](**told)
