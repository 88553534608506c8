"""Scenarios that need no harm done: peers of our own that keep no rule, come in crowds, or vanish.

They can be done to a fabric that serves others too: their models and names are their own.
"""

from __future__ import annotations

import time
from typing import Any

from zfabric.chaos.peers import CONTRACT_FIELDS, Rogue, scan, visitors
from zfabric.chaos.play import FINISH_S, Run, expect
from zfabric.chaos.remote import Remote
from zfabric.chaos.stage import Stage
from zfabric.processes import wait_for
from zfabric.protocol import MAGIC, VERSION, Type, encode, packed
from zfabric.words import counted

MANY_WORKERS, MANY_WORKERS_S = 500, 10.0
FILL_BATCHES, FILL_WORKERS, FILL_WINDOW = 3_099, 100, 31
# A broker remembers 1,000 workers that are gone: more at once would push others off its list.
FEW_VISITORS = 200
# A slice and one batch, on a machine that does other things too.
FILL_SLICE_MAX_S = 0.25
# Bytes that visitors may leave, however many there were.
VISITORS_RSS_MAX = 16 * 1024 * 1024


def port_scan(run: Run) -> None:
    host = run.fabric.address.split("//")[1].rsplit(":", 1)[0]
    for port in run.fabric.ports:
        scan(host, port, run.chance, 60)
    run.recovers()


def other_version(run: Run) -> None:
    hello = encode(Type.HELLO, {"role": "operator", "name": "old", "instance": 1})
    at = len(MAGIC)
    for version in (VERSION - 1, VERSION + 1):
        old = hello[0][:at] + bytes((version % 256,)) + hello[0][at + 1 :]
        with Rogue(run.fabric.address, run.fabric.keys.operator) as rogue:
            rogue.say([old])
            fields = rogue.hear(Type.ERROR).fields
        expect(fields["code"] == "version_mismatch", f"it was told {fields['code']}")
        named = all(str(v) in fields["text"] for v in (VERSION, version % 256))
        expect(named, f"the text does not name both versions: {fields['text']}")


def nonsense_workers(run: Run) -> None:
    nonsense: list[dict[str, Any]] = [
        {"batch_items_max": 0}, {"batch_items_max": -3}, {"batch_tokens_max": 2**62},
        {"batch_items_max": "many"}, {"batch_items_max": 1.5}, {"batch_tokens_max": None},
        {"input_tokens_max": 10**9}, {"batch_tokens_max": 1, "input_tokens_max": 100},
        {"model": ""}, {"window": 10**6}, {"ragged": "yes"}, {"name": "a\x1b[2J"},
    ]  # fmt: skip
    for k, changed in enumerate(nonsense):
        with run.rogue() as rogue:
            rogue.hello(f"{run.mark}-nonsense-{k}", f"{run.mark}-nobody", **changed)
            told = rogue.hear(Type.ERROR, Type.WELCOME)
            expect(told.kind is Type.ERROR, f"a worker with {changed} was welcomed")
    names = {row["name"] for row in run.ask("workers")}
    expect(not any("nonsense" in name for name in names), "nonsense is listed")


def name_collision(run: Run) -> None:
    name = f"{run.mark}-twin-{run.chance.getrandbits(32):08x}"
    model = f"{run.model}-twins"
    with run.rogue() as first, run.rogue() as second:
        first.hello(name, model)
        epoch = first.hear(Type.WELCOME).fields["epoch"]
        second.hello(name, model)
        code = second.hear(Type.ERROR, Type.WELCOME).fields.get("code")
        expect(code == "name_in_use", f"the second worker of a name was told {code}")
        # An older epoch comes back: it must not complete what it does not hold.
        first.tell(Type.DONE, {"epoch": epoch, "n": 7}, [b"", b"", b"", b""], b"")
        first.hear(Type.DONE_ACK)
        first.tell(Type.BYE, {"reason": "done"})


def wrong_completions(run: Run) -> None:
    model = f"{run.model}-wrong"
    with run.producing("wrong", model) as load:
        load.submit(1)
        with run.rogue() as rogue:
            rogue.hello(f"{run.mark}-rogue-{run.chance.getrandbits(32):08x}", model)
            rogue.hear(Type.WELCOME)
            rogue.tell(Type.HEARTBEAT, {"received": 0, "window": 1})
            _complete_wrongly(rogue)
            rogue.tell(Type.BYE, {"reason": "done"})
        load.await_end(FINISH_S)
        expect(not load.seen.twice, "a result is visible twice")


def _complete_wrongly(rogue: Rogue) -> None:
    """Unknown items, then the right ones twice: duplicates are counted, never taken."""
    batch = rogue.hear(Type.BATCH)
    batch_id = {"epoch": batch.fields["epoch"], "n": batch.fields["n"]}
    nonces, entries = batch.columns["nonces"], batch.columns["entries"]
    for told, expected_duplicates in (
        ([12_345], 1), (list(nonces), 0), (list(nonces), len(nonces)),
    ):  # fmt: skip
        places = entries if told != [12_345] else entries[:1]
        columns = [packed("Q", told), packed("I", places), bytes(len(told))]
        columns.append(packed("I", [2] * len(told)))
        rogue.tell(Type.DONE, batch_id, columns, b"ok" * len(told))
        fields = rogue.hear(Type.DONE_ACK).fields
        found = fields["duplicates"]
        expect(
            found == expected_duplicates,
            f"{counted(found, 'duplicate')}, not {expected_duplicates}",
        )


def come_and_go(run: Run) -> None:
    stage = run.fabric if isinstance(run.fabric, Stage) else None
    worker = {"role": "worker", "model": f"{run.model}-visitors", **CONTRACT_FIELDS}
    tenth = max(1, run.cycles // 20)
    # What the first visitors leave is what any leave: names that are remembered, pools of memory.
    _visit(run, tenth, worker)
    before = stage.used().rss_bytes if stage is not None else 0
    _visit(run, run.cycles // 2 - tenth, worker)
    run.recovers()
    if stage is not None:
        grown = stage.used().rss_bytes - before
        expect(
            grown <= VISITORS_RSS_MAX,
            f"{counted(run.cycles, 'visitor')} left {grown:,} bytes in memory",
        )


def _visit(run: Run, each: int, worker: dict[str, Any]) -> None:
    """So many operators, and so many workers."""
    fabric, mark = run.fabric, f"{run.mark}-visitor"
    visitors(fabric.address, each, {"role": "operator"}, mark, fabric.keys.operator)
    some = FEW_VISITORS if isinstance(fabric, Remote) else each
    for begun in range(0, each, some):
        visitors(fabric.workers_address, min(some, each - begun), worker, mark, fabric.keys.worker)
        if isinstance(fabric, Remote):
            fabric.forget(mark)


def many_workers(run: Run) -> None:
    model = f"{run.model}-crowd"
    with run.producing("crowd", model) as load:
        began = time.monotonic()
        with run.crowd(MANY_WORKERS, model) as crowd:
            wait_for(f"{MANY_WORKERS} workers", lambda: _live(run, model) == MANY_WORKERS, 60.0)
            took = time.monotonic() - began
            run.recovered_s.append(took)
            # Not where the broker let them in at its pace, as it should.
            in_time = took < MANY_WORKERS_S or crowd.waited
            expect(in_time, f"{MANY_WORKERS} workers took {took:.1f} s to register")
            load.submit(10 * MANY_WORKERS)
            load.await_end(FINISH_S)
            expect(_live(run, model) == MANY_WORKERS, "a worker was taken for dead at full load")


def _live(run: Run, model: str) -> int:
    return sum(1 for row in run.ask("workers") if row["live"] and row["model"] == model)


def _disconnects(run: Run, model: str) -> int:
    return sum(row["disconnects"] for row in run.ask("workers") if row["model"] == model)


def big_fill(run: Run) -> None:
    model = f"{run.model}-fill"
    with run.producing("fill", model) as load:
        for _ in range(8):
            load.submit(FILL_BATCHES, length=100)
        before = _disconnects(run, model)
        with run.crowd(FILL_WORKERS, model, window=FILL_WINDOW):
            load.await_end(FINISH_S)
            lost = _disconnects(run, model) - before
            expect(not lost, f"{counted(lost, 'worker')} lost during the fill")
        slice_s = run.status()["dispatch_slice_max_s"]
        expect(slice_s <= FILL_SLICE_MAX_S, f"the loop was held for {slice_s:.3f} s")
