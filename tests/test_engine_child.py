from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.engines import (
    ClosingEngine,
    CountingEngine,
    DescribingEngine,
    EchoEngine,
    ObeyingEngine,
    OverlappingEngine,
    StubbornEngine,
    UnloadableEngine,
    UnsayableEngine,
    batch_of,
)
from zfabric import engine_child
from zfabric.engine import CacheStats
from zfabric.engine_child import EngineChild, Exited, Failed, Loaded, Results, Stats
from zfabric.errors import ConfigError, InvariantError

PATIENCE_S = 30.0
# What a loop that also heartbeats may lose to one call.
PROMPT_S = 2.0


def collect(child, until):
    """Every event up to the first for which `until` holds."""
    events = []
    deadline = time.monotonic() + PATIENCE_S
    while not any(map(until, events)):
        remaining_s = deadline - time.monotonic()
        assert remaining_s > 0, f"only {events} came"
        wait(child.waitables(), remaining_s)
        events += child.receive()
    return events


def loaded(child):
    child.start()
    assert collect(child, lambda e: isinstance(e, Stats))[0] == Loaded()
    return child


def outcome(child, *payloads, batch_id=1):
    """Events of one batch, without what the counters say."""
    child.send(batch_id, batch_of(*payloads))
    events = collect(child, lambda e: isinstance(e, (Failed, Exited, Stats)))
    return [event for event in events if not isinstance(event, Stats)]


def descriptors():
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def exit_of(child):
    return collect(child, lambda e: isinstance(e, Exited))[-1]


@contextlib.contextmanager
def hosted(factory):
    child = EngineChild(factory)
    try:
        yield loaded(child)
    finally:
        child.kill()
        child.stop(0)


@pytest.fixture(scope="module")
def obeying():
    """One child for every test that leaves it alive."""
    with hosted(ObeyingEngine) as child:
        yield child


def test_batch_arrives_whole_and_results_come_back():
    batch = batch_of(b"\x00payload\xff", pad_to=16, length=11)
    with hosted(DescribingEngine) as child:
        child.send(2**40, batch)
        result = Results(2**40, (0,), ("ok",), (repr(batch).encode(),), final=True)
        assert result in collect(child, lambda e: isinstance(e, Results))


def test_partial_results_come_one_by_one(obeying):
    assert outcome(obeying, b"reverse", b"b", batch_id=3) == [
        Results(3, (1,), ("ok",), (b"B",), final=False),
        Results(3, (0,), ("ok",), (b"REVERSE",), final=False),
        Results(3, (), (), (), final=True),
    ]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (b"raise boom", "error"),
        (b"oom boom", "out_of_memory"),
        (b"unreachable boom", "unreachable"),
    ],
)
def test_engine_that_raises_stays_and_runs_the_next_batch(obeying, command, kind):
    (failed,) = outcome(obeying, command, batch_id=4)
    assert (failed.batch_id, failed.kind) == (4, kind)
    assert "boom" in failed.text
    assert obeying.idle
    assert outcome(obeying, b"next") == [Results(1, (0,), ("ok",), (b"NEXT",), final=True)]


def await_room(child):
    """Receive until another batch may be sent; nothing else is expected."""
    deadline = time.monotonic() + PATIENCE_S
    while not child.idle:
        assert time.monotonic() < deadline
        wait(child.waitables(), PATIENCE_S)
        assert child.receive() == []


def ends_of(child, count):
    """The batches that have ended, in order."""
    ended = []
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < count:
        assert time.monotonic() < deadline
        wait(child.waitables(), PATIENCE_S)
        events = [event for event in child.receive() if isinstance(event, Results)]
        ended += [event.batch_id for event in events if event.final]
    return ended


def test_batch_that_leaves_room_goes_on_beside_the_next_one():
    with hosted(OverlappingEngine) as child:
        child.send(1, batch_of(b"wait"))
        await_room(child)
        assert child.busy
        for batch_id in (2, 3):
            assert outcome(child, b"x", batch_id=batch_id)[-1].batch_id == batch_id
            # the last one sent is over, and the first goes on: there is room still
            assert child.idle and child.busy
        child.send(4, batch_of(b"go"))
        assert sorted(ends_of(child, 2)) == [1, 4]
        assert child.idle and not child.busy


def test_death_is_told_with_every_batch_in_hand():
    with hosted(OverlappingEngine) as child:
        child.send(1, batch_of(b"wait"))
        await_room(child)
        child.send(2, batch_of(b"wait"))
        await_room(child)
        child.kill()
        assert exit_of(child).batch_ids == (1, 2)


def test_an_engine_that_exits_in_the_rest_of_a_batch_is_gone_as_in_the_batch_itself():
    with hosted(OverlappingEngine) as child:
        child.send(1, batch_of(b"exit"))
        assert exit_of(child).batch_ids == (1,)


def test_room_said_twice_is_the_engines_fault():
    with hosted(OverlappingEngine) as child:
        (failed,) = outcome(child, b"rooms")
        assert (failed.kind, failed.text) == ("error", "run() gave ROOM twice")


def test_engine_that_holds_the_interpreter_delays_no_call(obeying):
    obeying.send(6, batch_of(b"hold 0.5"))
    calls = 0
    while not obeying.idle:
        began = time.monotonic()
        obeying.receive()
        assert time.monotonic() - began < PROMPT_S
        calls += 1
        wait(obeying.waitables(), 0.01)
    assert calls > 10


def test_interrupt_from_the_terminal_is_not_the_engines_business(obeying):
    os.kill(obeying.pid, signal.SIGINT)
    assert outcome(obeying, b"still") == [Results(1, (0,), ("ok",), (b"STILL",), final=True)]


def test_large_results_are_read_in_bounded_steps(obeying, monkeypatch):
    monkeypatch.setattr(engine_child, "RECEIVE_BYTES_MAX", 2**20)
    (results,) = outcome(obeying, b"inflate 9000000")
    assert len(results.payloads[0]) == 9_000_000


def test_stopped_child_blocks_neither_send_nor_receive(obeying):
    os.kill(obeying.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        obeying.send(8, batch_of(b"big", bytes(2**24)))
        assert obeying.receive() == []
        assert time.monotonic() - began < PROMPT_S
    finally:
        os.kill(obeying.pid, signal.SIGCONT)
    events = collect(obeying, lambda e: isinstance(e, Results))
    assert events[0].payloads[0] == b"BIG"


def test_child_stopped_in_the_middle_of_a_message_does_not_block_receive(obeying):
    obeying.send(9, batch_of(b"inflate 20000000"))
    assert wait([obeying.connection], PATIENCE_S)
    os.kill(obeying.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert obeying.receive() == []
        assert time.monotonic() - began < PROMPT_S
    finally:
        os.kill(obeying.pid, signal.SIGCONT)
    collect(obeying, lambda e: isinstance(e, Results))


def test_send_to_a_busy_or_absent_child_is_refused(obeying):
    obeying.send(10, batch_of(b"one"))
    with pytest.raises(InvariantError):
        obeying.send(11, batch_of(b"two"))
    collect(obeying, lambda e: isinstance(e, Stats))
    with pytest.raises(InvariantError):
        obeying.start()
    with pytest.raises(InvariantError):
        EngineChild(EchoEngine).send(1, batch_of(b"x"))


@pytest.mark.parametrize(
    ("command", "exitcode", "text"),
    [
        (b"die SIGKILL", -signal.SIGKILL, "killed by SIGKILL"),
        (b"segfault", -signal.SIGSEGV, "killed by SIGSEGV"),
        (b"exit 7", 7, "exited with status 7"),
    ],
)
def test_death_of_the_engine_is_told_with_the_batch_it_had(command, exitcode, text):
    with hosted(ObeyingEngine) as child:
        assert outcome(child, command, batch_id=12) == [Exited(exitcode, text, (12,))]
        assert not child.running
        assert child.waitables() == []
        assert child.receive() == []


def test_partial_result_before_a_hang_is_received_during_it():
    early = Results(13, (1,), ("ok",), (b"early",), final=False)
    with hosted(ObeyingEngine) as child:
        child.send(13, batch_of(b"reverse_and_hold 600", b"b"))
        assert collect(child, lambda e: isinstance(e, Results)) == [early]
        assert not child.idle
        child.kill()
        assert exit_of(child) == Exited(-signal.SIGKILL, "killed by SIGKILL", (13,))


def test_results_written_before_death_are_received_before_it():
    early = Results(13, (1,), ("ok",), (b"early",), final=False)
    with hosted(ObeyingEngine) as child:
        child.send(13, batch_of(b"reverse_and_hold 600", b"b"))
        assert wait([child.connection], PATIENCE_S)
        child.kill()
        assert wait([child.sentinel], PATIENCE_S)
        died = Exited(-signal.SIGKILL, "killed by SIGKILL", (13,))
        assert child.receive() == [early, died]


def test_death_is_seen_although_a_process_of_the_engine_lives_on():
    with hosted(ObeyingEngine) as child:
        (results,) = outcome(child, b"fork")
        orphan = int(results.payloads[0])
        try:
            child.kill()
            began = time.monotonic()
            assert exit_of(child).exitcode == -signal.SIGKILL
            assert time.monotonic() - began < PROMPT_S
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_killed_child_that_never_read_its_batch_does_not_hold_the_writer():
    threads_before = threading.active_count()
    with hosted(ObeyingEngine) as child:
        os.kill(child.pid, signal.SIGSTOP)
        child.send(14, batch_of(bytes(2**24)))
        child.kill()
        assert exit_of(child) == Exited(-signal.SIGKILL, "killed by SIGKILL", (14,))
        assert threading.active_count() == threads_before


def test_restart_begins_anew_and_leaks_no_descriptor():
    with hosted(functools.partial(CountingEngine, 5)) as child:
        child.send(1, batch_of(b"a", b"b"))
        events = collect(child, lambda e: isinstance(e, Stats))
        assert events[-1] == Stats(CacheStats(7, 0, "worker"))
        open_before = descriptors()
        first_pid = child.pid
        child.kill()
        exit_of(child)
        child.start()
        events = collect(child, lambda e: isinstance(e, Stats))
        assert events == [Loaded(), Stats(CacheStats(5, 0, "worker"))]
        assert child.idle
        assert child.pid != first_pid
        assert descriptors() == open_before


def test_engine_that_cannot_load_says_why_and_exits():
    child = EngineChild(UnloadableEngine)
    child.start()
    failed, exited = collect(child, lambda e: isinstance(e, Exited))
    assert (failed.batch_id, failed.kind) == (None, "error")
    assert "FileNotFoundError: no such model" in failed.text
    assert exited == Exited(1, "exited with status 1", ())


def test_reason_that_is_no_utf8_is_told_all_the_same():
    child = EngineChild(UnsayableEngine)
    child.start()
    failed, _ = collect(child, lambda e: isinstance(e, Exited))
    assert (failed.kind, failed.text) == ("config", "cannot read /models/\\udcff.gguf")


def test_end_is_heard_of_where_a_parent_left_sigchld_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with hosted(EchoEngine) as child:
            child.kill()
            assert exit_of(child).exitcode == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_factory_that_cannot_travel_is_a_configuration_error(obeying):
    open_before = descriptors()
    child = EngineChild(lambda: EchoEngine())
    with pytest.raises(ConfigError, match=r"functools\.partial"):
        child.start()
    assert not child.running
    assert descriptors() == open_before


def test_unreadable_bytes_from_the_child_end_it():
    with hosted(EchoEngine) as child:
        child._decoder.feed(b"\x93\x01\x02\x03")  # a message, but not one of ours
        child.send(15, batch_of(b"x"))
        exited = exit_of(child)
        assert exited.exitcode == -signal.SIGKILL
        assert "unreadable message" in exited.text
        assert exited.batch_ids == (15,)


def test_polite_stop_closes_the_engine(tmp_path):
    with hosted(functools.partial(ClosingEngine, str(tmp_path / "mark"))) as child:
        assert child.stop(PATIENCE_S)
        assert (tmp_path / "mark").read_text() == "closed"
        assert child.receive() == [Exited(0, "exited with status 0", ())]
        assert child.stop(0)


def test_stop_keeps_results_that_arrive_meanwhile():
    with hosted(ObeyingEngine) as child:
        child.send(16, batch_of(b"inflate 5000000"))
        assert child.stop(PATIENCE_S)
        results, _, exited = child.receive()
        assert len(results.payloads[0]) == 5_000_000
        assert exited == Exited(0, "exited with status 0", ())


def test_stop_terminates_a_busy_engine_and_kills_a_stubborn_one(monkeypatch):
    monkeypatch.setattr(engine_child, "TERMINATE_WAIT_S", 0.2)
    with hosted(ObeyingEngine) as child:
        child.send(17, batch_of(b"hold 600"))
        assert child.stop(0)
        assert child.receive()[-1] == Exited(-signal.SIGTERM, "killed by SIGTERM", (17,))
    with hosted(StubbornEngine) as child:
        pid = child.pid
        assert child.stop(0.1)
        assert child.receive()[-1] == Exited(-signal.SIGKILL, "killed by SIGKILL", ())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_child_outlives_the_thread_that_started_it():
    child = EngineChild(EchoEngine)
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    try:
        collect(child, lambda e: isinstance(e, Loaded))
        assert outcome(child, b"x") == [Results(1, (0,), ("ok",), (b"X",), final=True)]
    finally:
        child.kill()
        child.stop(0)


SUPERVISOR = """
    import sys
    from multiprocessing.connection import wait

    sys.path.insert(0, {tests!r})
    from engines import ObeyingEngine, batch_of
    from zfabric.engine_child import EngineChild, Results

    class MainEngine(ObeyingEngine):
        pass

    def events(child):
        wait(child.waitables(), {patience_s})
        return child.receive()

    if __name__ == "__main__":
        child = EngineChild(MainEngine)
        child.start()
        while not child.idle:
            events(child)
        child.send(1, batch_of({command!r}, b"b"))
        while not any(isinstance(event, Results) for event in events(child)):
            pass
        print(child.pid, flush=True)
        {then}
"""


@contextlib.contextmanager
def supervisor(tmp_path, command, then):
    """(a process that has an engine child in hand, the child's pid, a descriptor of the child)"""
    tests = str(Path(__file__).parent)
    script = tmp_path / "supervisor.py"
    source = SUPERVISOR.format(tests=tests, patience_s=PATIENCE_S, command=command, then=then)
    script.write_text(textwrap.dedent(source))
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        pid = int(process.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            yield process, pidfd
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@pytest.mark.parametrize("command", [b"reverse", b"reverse_and_hold 600"])
def test_child_ends_with_a_killed_supervisor_idle_or_holding_the_interpreter(tmp_path, command):
    with supervisor(tmp_path, command, "sys.stdin.read()") as (process, pidfd):
        assert not wait([pidfd], 0)
        process.kill()
        assert wait([pidfd], 5.0)


def test_supervisor_that_ends_without_stop_takes_its_child_along(tmp_path):
    with supervisor(tmp_path, b"reverse_and_hold 600", "sys.exit(3)") as (process, pidfd):
        assert process.wait(10) == 3
        assert wait([pidfd], 5.0)


def test_what_an_engine_prints_does_not_mix_with_data(tmp_path):
    with supervisor(tmp_path, b"print noise", "child.stop(5)") as (process, _):
        assert process.stdout.read() == b""
