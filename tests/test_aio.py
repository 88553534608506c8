"""AsyncClient against a real broker: awaiting instead of waiting, and nothing else different."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading

import pytest

from tests.running import FAST, SLOW, brokering, request, serving, write_batch
from zfabric import AsyncClient
from zfabric.errors import Backpressure, ConnectError, ItemFailed, TimeoutExpired
from zfabric.results import Item
from zfabric.shapes import Shape
from zfabric_workers.sim import SimEngine

pytestmark = pytest.mark.e2e

SHAPE = Shape.of("m", "system", tokens=[4])


def item(k, length=8):
    return Item(SHAPE, f"payload {k}".encode(), length, custom_id=f"q-{k}")


async def later(items, every=0):
    """An asynchronous source; it gives the loop away before each `every`-th item."""
    for k, each in enumerate(items):
        if every and k % every == 0:
            await asyncio.sleep(0)
        yield each


def run(scenario, factory=FAST, **config):
    """Run `scenario(client)` in a loop, against a broker with a worker."""

    async def main(address):
        async with AsyncClient(address) as client:
            return await scenario(client)

    with brokering(**config) as broker, serving(factory, broker.address):
        return asyncio.run(main(broker.address))


def test_submit_returns_once_accepted_and_its_future_gives_the_result():
    async def scenario(client):
        future = await client.submit(item(1))
        result = await future
        assert result.ok and result.custom_id == "q-1"
        assert result.payload.startswith(b"sim:")

    run(scenario)


def test_a_failure_is_raised_by_the_future():
    async def scenario(client):
        future = await client.submit(item(1))
        with pytest.raises(ItemFailed, match="simulated_failure"):
            await future

    run(scenario, functools.partial(SimEngine, speed=0, fail_on=b"payload"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_submit_many_takes_any_iterable(asynchronous):
    async def scenario(client):
        items = [item(k) for k in range(2_500)]
        results = await client.submit_many(later(items, 100) if asynchronous else items)
        assert len(results) == 2_500
        ids = [result.custom_id async for result in results]
        assert sorted(ids) == sorted(each.custom_id for each in items)
        assert results.done == results.taken == 2_500

    run(scenario)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_map_gives_every_result_once_and_in_order_where_asked(ordered, asynchronous):
    async def scenario(client):
        wanted = [f"q-{k}" for k in range(700)]
        items = (item(k, 8 + k % 50) for k in range(700))
        source = later(items, 7) if asynchronous else items
        got = [r.custom_id async for r in client.map(source, buffersize=64, ordered=ordered)]
        assert (got if ordered else sorted(got)) == (wanted if ordered else sorted(wanted))

    run(scenario)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_no_item_is_told(asynchronous):
    async def scenario(client):
        items = [item(0), None]
        with pytest.raises(TypeError, match="items must be Item, not NoneType"):
            await client.submit_many(later(items) if asynchronous else items)

    run(scenario)


def test_a_window_larger_than_the_room_that_is_left_goes_in_parts():
    async def main(address):
        async with AsyncClient(address, buffer_items=40) as client:
            nobody = Item(Shape.of("nobody"), b"", 1)
            for _ in range(36):
                await client.submit(nobody)
            got = [r.custom_id async for r in client.map(map(item, range(30)), buffersize=1_000)]
            assert sorted(got) == sorted(f"q-{k}" for k in range(30))
            assert not client.client._room
            # Not by leaving, which would wait for what nobody serves.
            await client.close()

    with brokering() as broker, serving(FAST, broker.address):
        asyncio.run(main(broker.address))


def test_an_asynchronous_source_runs_in_one_task():
    seen = []
    place = contextvars.ContextVar("place", default=0)

    async def source():
        for k in range(4):
            seen.append(place.get())
            place.set(k + 1)
            yield item(k)
            await asyncio.sleep(0.01)

    async def scenario(client):
        assert len([r async for r in client.map(source())]) == 4
        assert seen == [0, 1, 2, 3]

    run(scenario)


def test_map_takes_no_more_than_its_buffer_ahead():
    async def scenario(client):
        taken = 0

        def source():
            nonlocal taken
            for k in range(500):
                taken += 1
                yield item(k)

        done = 0
        async for _ in client.map(source(), buffersize=20):
            done += 1
            assert taken - done <= 40, "a chunk being filled, and one that is open"
        assert done == 500

    run(scenario)


def test_a_source_that_waits_does_not_hold_back_what_it_gave():
    async def scenario(client):
        answered = asyncio.Event()

        async def source():
            yield item(1)
            await answered.wait()
            yield item(2)

        got = []
        async for result in client.map(source(), timeout=30):
            got.append(result.custom_id)
            answered.set()
        assert got == ["q-1", "q-2"]

    run(scenario)


def test_an_error_of_the_source_comes_out_of_map():
    async def scenario(client):
        async def source():
            yield item(1)
            raise LookupError("the source broke")

        with pytest.raises(LookupError, match="the source broke"):
            async for _ in client.map(source()):
                pass

    run(scenario)


def test_leaving_a_map_early_leaves_nothing_running():
    async def scenario(client):
        before = asyncio.all_tasks()
        results = client.map((item(k) for k in range(10_000)), buffersize=10)
        async for _ in results:
            break
        await results.aclose()
        assert asyncio.all_tasks() == before

    run(scenario)


def test_map_without_a_result_in_time_says_so():
    async def main(address):
        client = await AsyncClient(address).connect()
        try:
            with pytest.raises(TimeoutExpired, match=r"no result for 0\.2 s"):
                async for _ in client.map([item(1)], timeout=0.2):
                    pass
        finally:
            await client.close()

    with brokering() as broker:
        asyncio.run(main(broker.address))


def test_a_full_buffer_makes_submit_wait_and_then_give_up():
    async def main(address):
        client = await AsyncClient(address, buffer_items=2).connect()
        try:
            await client.submit(item(1))
            await client.submit(item(2))
            with pytest.raises(Backpressure):
                await client.submit(item(3), timeout=0.1)
            # Giving up must not harm the client: with a worker there is room again.
            with serving(FAST, address):
                third = await client.submit(item(3), timeout=30)
                assert (await third).ok
        finally:
            await client.close()

    with brokering() as broker:
        asyncio.run(main(broker.address))


def test_a_cancelled_wait_leaves_the_client_at_work():
    async def scenario(client):
        waiting = asyncio.create_task(client.submit(item(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await (await client.submit(item(2)))).ok

    run(scenario)


def test_no_thread_for_each_of_many_items():
    async def scenario(client):
        before = threading.active_count()
        futures = [await client.submit(item(k)) for k in range(50)]
        most = threading.active_count()
        await asyncio.gather(*futures)
        assert most < before + 5

    run(scenario)


def test_stats_drain_and_run_batch(tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request(f"q-{k}") for k in range(20)])

    async def scenario(client):
        results = await client.submit_many(item(k) for k in range(10))
        with pytest.raises(TimeoutExpired):
            await client.drain(timeout=0.01)
        await client.drain()
        assert results.done == 10
        summary = await client.run_batch(source, tmp_path / "out.jsonl")
        assert summary.ok and summary.done == 20
        stats = await client.stats()
        assert stats["residual_items"] == 0 and stats["completed_items"] == 30

    run(scenario, SLOW)


def test_a_client_that_is_not_open_says_so():
    async def main():
        with pytest.raises(ConnectError, match="async with"):
            await AsyncClient("tcp://127.0.0.1:9").submit(item(1))
        with pytest.raises(ConnectError, match="no broker answered"):
            await AsyncClient("tcp://127.0.0.1:9", timeout_s=0.2).connect()

    asyncio.run(main())
