"""HELLO: a refused one leaves whoever has the name where it was."""

from __future__ import annotations

import pytest

from tests.harness import Bench
from zfabric.protocol import Type


@pytest.mark.parametrize("contract", [{"batch": 0}, {"longest": 512}, {"model": ""}])
def test_refused_hello_of_a_known_process_keeps_its_old_connection(contract: dict) -> None:
    """Found by a flood of fuzzed frames: the worker was no peer any more and was offered batches

    for ever, a slice at a time.
    """
    bench = Bench()
    other = bench.worker("other")
    worker = bench.worker("gpu0")
    old = worker.routing_id
    worker.hello(**contract)
    bench.settle()
    assert worker.inbox[-1].kind is Type.ERROR or not worker.inbox
    peer = bench.fabric.workers["gpu0"].peer
    assert peer is not None and bench.dispatcher.peers["workers", old] is peer
    bench.producer().submit([10] * 40)
    bench.settle()
    del bench.ends["workers", old]
    bench.dispatch()
    assert bench.fabric.workers["gpu0"].peer is None, "its connection is gone, and that is known"
    assert other.batches
    bench.check()


def test_hello_of_the_same_process_takes_its_name_over() -> None:
    bench = Bench()
    worker = bench.worker("gpu0")
    old = worker.routing_id
    worker.hello()
    bench.settle()
    assert ("workers", old) not in bench.dispatcher.peers
    assert bench.fabric.workers["gpu0"].peer is bench.dispatcher.peers["workers", worker.routing_id]
