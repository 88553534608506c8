from __future__ import annotations

import multiprocessing

import msgpack
import pytest

from tests.engines import EchoEngine, ObeyingEngine, batch_of
from zfabric import engine_host
from zfabric.engine import CacheStats, Result
from zfabric.engine_host import TEXT_BYTES_MAX, _answers, _batch_of, run_message, unpacker

OK = Result.ok(b"x")


class Returning(EchoEngine):
    """run() gives back what it was made with; so does cache_stats()."""

    def __init__(self, returned, stats=None):
        self.returned = returned
        self.stats = stats

    def run(self, batch):
        return self.returned

    def cache_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def answers(engine, *payloads):
    return list(_answers(engine, 7, batch_of(*payloads)))


def test_batch_survives_the_wire_unchanged():
    batch = batch_of(b"\x00\xff", b"", pad_to=8)
    decoder = unpacker()
    decoder.feed(msgpack.packb(run_message(7, batch)))
    assert _batch_of(next(iter(decoder))) == (7, batch)


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        (None, "returned NoneType, not a sequence"),
        ({0: OK, 1: OK}, "returned dict, not a sequence"),
        (b"ok", "returned bytes, not a sequence"),
        ("ok", "returned str, not a sequence"),
        ([], "returned 0 results for 2 items"),
        ([OK], "returned 1 result for 2 items"),
        ((OK, OK, OK), "returned 3 results for 2 items"),
        ([OK, None], "result 1 is NoneType, not a Result"),
        ([OK, b"x"], "result 1 is bytes, not a Result"),
        ([OK, Result("fine", b"")], "result 1 has the unknown status 'fine'"),
        ([OK, Result(["ok"], b"")], "unhashable"),
        ([OK, Result("ok", "text")], "result 1 has a str payload, not bytes"),
        ([OK, Result("ok", bytearray(b"x"))], "result 1 has a bytearray payload"),
        (iter([]), "gave 0 results for 2 items"),
        (iter([(0, OK)]), "gave 1 result for 2 items"),
        (iter([(0, OK), (0, OK)]), "gave index 0 twice"),
        (iter([(0, OK), (2, OK)]), "gave index 2 in a batch of 2 items"),
        (iter([(-1, OK)]), "gave index -1 in a batch of 2 items"),
        (iter([(True, OK)]), "gave an index of type bool"),
        (iter([("0", OK)]), "gave an index of type str"),
        (iter([OK]), "gave Result, not a pair"),
        (iter([(0, OK, OK)]), "gave tuple, not a pair"),
        (iter([(0, b"x")]), "result 0 is bytes, not a Result"),
        (iter([(0, OK), (1, Result("ok", None))]), "result 1 has a NoneType payload"),
    ],
)
def test_answer_that_breaks_the_contract_is_an_error_that_names_it(returned, fault):
    kind, batch_id, failure, text = answers(Returning(returned), b"a", b"b")[-1]
    assert (kind, batch_id, failure) == ("failed", 7, "error")
    assert fault in text


def test_sequence_is_sent_whole_or_not_at_all():
    assert len(answers(Returning([OK, None]), b"a", b"b")) == 1


def test_results_that_exceed_a_message_are_an_error(monkeypatch):
    monkeypatch.setattr(engine_host, "RESULT_BYTES_MAX", 3)
    assert "at most 3 may" in answers(Returning([Result.ok(b"xx")] * 2), b"a", b"b")[-1][3]
    pairs = iter([(0, Result.ok(b"xxxx"))])
    assert "result 0 is over 3 bytes" in answers(Returning(pairs), b"a", b"b")[-1][3]


def test_partial_results_precede_an_empty_final_one():
    assert answers(ObeyingEngine(), b"reverse", b"b") == [
        ("results", 7, (1,), ("ok",), (b"B",), False),
        ("results", 7, (0,), ("ok",), (b"REVERSE",), False),
        ("results", 7, (), [], [], True, None),
    ]


def test_error_after_partial_results_keeps_them():
    first, last = answers(ObeyingEngine(), b"reverse_and_raise cuda", b"b")
    assert first == ("results", 7, (1,), ("ok",), (b"early",), False)
    assert last[:3] == ("failed", 7, "out_of_memory")


@pytest.mark.parametrize(
    ("error", "kind"),
    [("raise boom", "error"), ("oom boom", "out_of_memory"), ("unreachable boom", "unreachable")],
)
def test_exception_is_told_with_its_place(error, kind):
    (message,) = answers(ObeyingEngine(), error.encode())
    assert message[:3] == ("failed", 7, kind)
    assert "boom" in message[3]
    assert "engines.py:" in message[3]


def test_memory_error_counts_as_out_of_memory():
    def starved():
        raise MemoryError
        yield

    assert answers(Returning(starved()), b"a")[-1][2] == "out_of_memory"


@pytest.mark.parametrize("text", ["é" * TEXT_BYTES_MAX, "\ud800 lone", "x" * 10 * TEXT_BYTES_MAX])
def test_text_of_an_exception_is_bounded_and_encodable(text):
    class Raising(EchoEngine):
        def run(self, batch):
            raise ValueError(text)

    told = answers(Raising(), b"a")[-1][3]
    assert len(told.encode()) <= TEXT_BYTES_MAX
    assert told.startswith("ValueError: ")
    assert "test_engine_host.py" in told


@pytest.mark.parametrize(
    "stats",
    [
        RuntimeError("no counters"),
        CacheStats(-1, 0, "worker"),
        CacheStats(None, 0, "worker"),
        CacheStats(1.5, 0, "worker"),
        CacheStats(2**64, 0, "worker"),
        CacheStats(1, 0, "guess"),
        (1, 2),
    ],
)
def test_stats_that_cannot_be_had_are_none_and_cost_no_result(stats, capfd):
    (message,) = answers(Returning([OK], stats), b"a")
    assert message == ("results", 7, (0,), ["ok"], [b"x"], True, None)
    assert "Traceback" in capfd.readouterr().err


def test_stats_travel_with_the_final_result():
    (message,) = answers(Returning([OK], CacheStats(9, 4, "engine")), b"a")
    assert message[6] == (9, 4, "engine")


def test_watching_thread_ends_the_process_when_the_lifeline_closes(monkeypatch):
    ended = []
    monkeypatch.setattr(engine_host.os, "_exit", ended.append)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.close()
    engine_host._end_with(ours)
    assert ended == [engine_host.EXIT_ORPHANED]
    ours.close()
