"""The scenarios: each does one fault to a fabric at work and comes back when it is over.

Numbers are those of the list of faults in docs/chaos.md. What a scenario expects of the broker's
answers it checks itself; that nothing is lost, the judge does.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import Any

import zmq

from zfabric.chaos.exits import KEPT_OUT
from zfabric.chaos.play import FINISH_S, Run, Scenario, expect, pause
from zfabric.chaos.stage import LEASE_S, START_S
from zfabric.chaos.strangers import (
    FILL_BATCHES,
    MANY_WORKERS,
    big_fill,
    come_and_go,
    many_workers,
    name_collision,
    nonsense_workers,
    other_version,
    port_scan,
    wrong_completions,
)
from zfabric.errors import FabricError, TooManyConnections
from zfabric.processes import wait_for

# Beyond any lease.
LONG_S = 2 * LEASE_S
HANG, POISON, SLOW = b"HANG", b"POISON", b"SLOW"
DISK_MAX, DISK_PAYLOAD_BYTES = "6MiB", 16_384


# -- workers and engines --------------------------------------------------------------------------


def worker_killed(run: Run) -> None:
    run.progress(run.chance.randrange(20, 60))
    name = run.chance.choice(sorted(run.stage.workers))
    run.stage.signal_worker(name, signal.SIGKILL)
    run.stage.start_worker(name)
    run.recovers()


def engine_killed(run: Run) -> None:
    run.progress(run.chance.randrange(20, 60))
    run.stage.kill_engine(run.chance.choice(sorted(run.stage.workers)))
    run.recovers()


def engine_blocked(run: Run) -> None:
    before = run.disconnects()
    run.load.submit(1, text=HANG)
    run.load.await_end(FINISH_S)
    expect(run.disconnects() == before, "a worker whose engine was blocked was taken for dead")


def worker_stopped(run: Run) -> None:
    run.progress(20)
    name = run.chance.choice(sorted(run.stage.workers))
    run.stage.signal_worker(name, signal.SIGSTOP)
    pause(LONG_S)
    run.stage.signal_worker(name, signal.SIGCONT)
    run.recovers()


def workers_gone(run: Run) -> None:
    run.progress(20)
    for name in list(run.stage.workers):
        run.stage.signal_worker(name, signal.SIGKILL)
    pause(1.0)
    for name in list(run.stage.workers):
        run.stage.start_worker(name)
    run.recovers()
    run.stage.start_worker(f"late{run.chance.getrandbits(16)}")


def poison_item(run: Run) -> None:
    (number,) = run.load.submit(1, text=POISON, excuse=frozenset({"dead"}))
    run.progress(20)
    run.stage.end_broker()
    run.stage.start_broker()
    run.recovers()
    run.load.await_end(FINISH_S)
    (word, payload), *_ = run.load.seen.results[number]
    expect(word == "dead", f"the poison item ended as {word}")
    expect(json.loads(payload)["code"] == "dead", f"its result says {payload!r}")


def long_task(run: Run) -> None:
    before = run.status()["redeliveries_total"]
    run.load.submit(1, text=SLOW)
    run.load.await_end(FINISH_S)
    expect(run.status()["redeliveries_total"] == before, "a long task was given out twice")


# -- the broker -----------------------------------------------------------------------------------


def broker_drained(run: Run) -> None:
    run.progress(20)
    code = run.stage.end_broker(signal.SIGTERM)
    expect(code == 0, f"the broker ended a drain with code {code}: {run.stage.log_tail()}")
    run.stage.start_broker()
    run.recovers()


def broker_killed(run: Run) -> None:
    run.progress(run.chance.randrange(10, 80))
    run.stage.end_broker()
    run.stage.start_broker()
    run.recovers()


def roles_stopped(run: Run) -> None:
    run.progress(10)
    broker = run.stage.broker
    expect(broker is not None, "there is no broker")
    if broker is not None:
        broker.send_signal(signal.SIGSTOP)
        pause(LONG_S)
        broker.send_signal(signal.SIGCONT)
    run.recovers()
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for name in run.stage.workers:
            run.stage.signal_worker(name, sign)
        pause(LONG_S if sign == signal.SIGSTOP else 0.0)
    run.recovers()


def disk_limit(run: Run) -> None:
    for name in run.stage.workers:
        run.stage.signal_worker(name, signal.SIGSTOP)
    failed: list[Exception] = []

    def submit() -> None:
        try:
            run.load.submit(500, text=bytes(DISK_PAYLOAD_BYTES))
        except FabricError as error:
            failed.append(error)

    # Not waited for where the run is ended by a signal.
    submitting = threading.Thread(target=submit, daemon=True)
    submitting.start()
    wait_for("a full disk", lambda: bool(run.status()["storage"]["full"]), START_S)
    for name in run.stage.workers:
        run.stage.signal_worker(name, signal.SIGCONT)
    run.recovers()
    submitting.join(FINISH_S)
    expect(not submitting.is_alive() and not failed, f"the disk stayed full: {failed}")


def few_descriptors(run: Run) -> None:
    run.progress(10)
    run.stage.end_broker()
    limited = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    try:
        run.stage.start_broker(before=limited)
        pause(2.0)
        run.stage.end_broker()
    except FabricError as error:
        expect("ulimit -n" in str(error), f"the error does not name the fix: {error}")
    run.stage.start_broker()
    run.recovers()
    expect(not run.status()["quarantined_items"], "items were quarantined")


# -- links ----------------------------------------------------------------------------------------


def link_reset(run: Run) -> None:
    for _ in range(5):
        run.link.break_links(reset=True)
        pause(1.0)
    run.recovers()


def link_cut(run: Run) -> None:
    run.progress(10)
    run.link.cut = True
    run.link.break_links(reset=False)
    pause(LONG_S)
    run.link.cut = False
    run.recovers()


def link_one_way(run: Run) -> None:
    run.progress(10)
    up = run.chance.random() < 0.5
    run.link.silent_up, run.link.silent_down = up, not up
    pause(LONG_S + 2.0)
    run.link.silent_up = run.link.silent_down = False
    # Their bytes are gone, as after a crash of a router: the connections cannot go on.
    run.link.break_links(reset=True)
    run.recovers()


def link_late(run: Run) -> None:
    run.link.delay_s = 0.2
    run.load.await_end(FINISH_S)
    run.link.delay_s = 0.0


def link_bounced(run: Run) -> None:
    for _ in range(3):
        run.link.cut = True
        run.link.break_links(reset=False)
        pause(0.5)
        run.link.cut = False
        pause(0.5)
    run.recovers()


def link_repeats(run: Run) -> None:
    run.link.repeat_one_of = 20
    pause(3.0)
    run.link.repeat_one_of = 0
    run.link.break_links(reset=True)
    run.recovers()


# -- producers ------------------------------------------------------------------------------------


def producer_killed(run: Run) -> None:
    serial = f"{run.chance.getrandbits(32):08x}"
    source = run.directory / f"{serial}.jsonl"
    rows = [_request(f"{serial}-{k}", k, run.model) for k in range(300)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    torn, whole = run.directory / f"{serial}-torn.jsonl", run.directory / f"{serial}-whole.jsonl"

    def job(output: Any, *flags: str) -> Any:
        words = ("run-batch", "-i", source, "-o", output, "--broker", run.fabric.address, *flags)
        return run.processes.zfabric(*words, cwd=run.directory)

    first = job(torn)
    wait_for("its first lines", lambda: torn.exists() and torn.read_bytes().count(b"\n") > 20, 60.0)
    first.kill()
    first.communicate()
    began = time.monotonic()
    for process in (job(torn, "--resume"), job(whole)):
        process.communicate(timeout=FINISH_S)
        expect(process.returncode == 0, f"run-batch ended with code {process.returncode}")
    run.recovered_s.append(time.monotonic() - began)
    bodies = [
        {row["custom_id"]: row["response"]["body"] for row in map(json.loads, text.splitlines())}
        for text in (torn.read_text("utf-8"), whole.read_text("utf-8"))
    ]
    expect(torn.read_bytes().count(b"\n") == len(rows), "a line is missing or there twice")
    expect(bodies[0] == bodies[1], "its results are not those of a run without faults")


def _request(custom_id: str, k: int, model: str) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"You are number {k % 5}."},
        {"role": "user", "content": f"What is {k}? " * (1 + k % 40)},
    ]
    body = {"model": model, "messages": messages}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def producer_exits(run: Run) -> None:
    name = f"exits-{run.chance.getrandbits(32):08x}"
    process = run.processes.python(
        "zfabric.chaos.exits", "submit", address=run.fabric.address, name=f"{run.mark}-{name}",
        model=run.model, key=run.fabric.keys.producer,
    )  # fmt: skip
    said, _ = process.communicate(timeout=FINISH_S)
    if process.returncode == KEPT_OUT:
        raise TooManyConnections(said)
    expect(process.returncode == 0, f"the producer ended with code {process.returncode}")
    with run.producing(name, run.model) as heir:
        heir.await_results(1, FINISH_S)
        (word, _), *_ = heir.seen.results[1]
        expect(word == "ok", f"the item ended as {word}")


def slow_reader(run: Run) -> None:
    run.load.reading = False
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sleeper = context.socket(zmq.SUB)
    sleeper.setsockopt(zmq.SUBSCRIBE, b"")
    sleeper.connect(run.fabric.address.rsplit(":", 1)[0] + f":{run.fabric.ports[2]}")
    try:
        with run.producing("other", run.model) as other:
            other.submit(400)
            other.await_end(FINISH_S)
            expect(not other.seen.twice, "another producer got results twice")
    finally:
        sleeper.close(0)
        context.term()
        run.load.read_on()


def odd_items(run: Run) -> None:
    run.load.submit(1, length=5_000, excuse=frozenset({"too_long"}))
    run.load.submit(1, payload=b"")
    run.load.submit(1, length=0)
    run.load.submit(1, payload=run.chance.randbytes(run.load.client.payload_bytes_max))
    run.load.await_end(FINISH_S)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("worker_killed", (1,), "SIGKILL of a worker in a batch", worker_killed),
    Scenario("engine_killed", (1,), "SIGKILL of an engine alone", engine_killed),
    Scenario(
        "engine_blocked", (2,), "an engine that holds the interpreter", engine_blocked,
        engine=(f"hang_on={HANG.decode()}", f"hang_s={LONG_S}"),
    ),
    Scenario("worker_stopped", (2, 12), "SIGSTOP of a worker beyond its lease", worker_stopped),
    Scenario("broker_drained", (3,), "SIGTERM of the broker under load", broker_drained),
    Scenario("broker_killed", (4,), "SIGKILL of the broker under load", broker_killed),
    Scenario("link_reset", (5,), "every link reset each second", link_reset, linked=True),
    Scenario("link_cut", (5,), "every link gone beyond a lease", link_cut, linked=True),
    Scenario("link_one_way", (5,), "links that went one way", link_one_way, linked=True),
    Scenario("link_late", (5,), "up to 200 ms of jitter", link_late, linked=True, items=150),
    Scenario("link_bounced", (5,), "three bounces in three seconds", link_bounced, linked=True),
    Scenario("link_repeats", (5,), "bytes that come twice", link_repeats, linked=True),
    Scenario("producer_killed", (6,), "run-batch killed and resumed", producer_killed, items=0),
    Scenario(
        "poison_item", (7,), "an item that kills every engine; the broker killed meanwhile",
        poison_item, engine=(f"kill_on={POISON.decode()}",),
    ),
    Scenario("slow_reader", (8,), "a producer that does not read, a subscriber asleep",
             slow_reader),
    Scenario(
        "disk_limit", (9,), "the broker's limit of the disk reached, then room again",
        disk_limit, broker=("--max-disk", DISK_MAX), items=60,
    ),
    Scenario("few_descriptors", (10,), "a broker with 64 descriptors", few_descriptors, items=200),
    Scenario("name_collision", (11,), "two workers of one name", name_collision, crowd=2),
    Scenario("roles_stopped", (12,), "SIGSTOP of the broker, then of all workers", roles_stopped),
    Scenario("port_scan", (16,), "random bytes and half handshakes", port_scan, crowd=2),
    Scenario("other_version", (17,), "clients of other versions", other_version, crowd=2),
    Scenario("workers_gone", (18,), "all workers gone, two come back", workers_gone),
    Scenario("many_workers", (18,), f"{MANY_WORKERS} workers at once", many_workers, crowd=2),
    Scenario("big_fill", (19,), f"a fill of {FILL_BATCHES:,} batches", big_fill, crowd=2),
    Scenario("nonsense_workers", (20,), "workers that register nonsense", nonsense_workers,
             crowd=2),
    Scenario("odd_items", (21,), "too long, empty, of no length, of the largest size", odd_items,
             crowd=2),
    Scenario("wrong_completions", (22,), "twice completed, never given out", wrong_completions,
             crowd=2),
    Scenario(
        "long_task", (23,), "three times the lease with heartbeats", long_task, items=60,
        engine=(f"slow_on={SLOW.decode()}", f"slow_s={3 * LEASE_S}"),
    ),
    Scenario("producer_exits", (24,), "a process that ends right after submit()", producer_exits,
             crowd=2),
    Scenario("come_and_go", (16,), "connect, HELLO and vanish, again and again", come_and_go,
             crowd=2),
)  # fmt: skip
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def named(names: list[str]) -> list[Scenario]:
    """The scenarios with these names, all where there are none. Raises KeyError for another."""
    return [BY_NAME[name] for name in names] if names else list(SCENARIOS)
