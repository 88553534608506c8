"""The engine `openai` against a server that does everything wrong that a server can do."""

from __future__ import annotations

import contextlib
import functools
import json
import threading

import pytest

pytest.importorskip("aiohttp", reason="the extra zfabric[openai] is not installed")

from tests.fakeserver import CHAT, COMPLETIONS, EMBEDDINGS, Reply, completion, error, faking, reply
from tests.running import brokering, operating, read_rows, request, serving, until, write_batch
from zfabric.batchrun import run_batch
from zfabric.engine import ROOM, Batch, EngineUnreachable, OutOfMemory, Result
from zfabric.errors import ConfigError
from zfabric.shapes import Contract, Shape
from zfabric_workers import engine_factory, httpdriver
from zfabric_workers.httpdriver import ServerFault
from zfabric_workers.openai_server import OpenAIEngine

SHAPE = Shape.of("m", "prefix")


def batch(*texts, shape=SHAPE, url=CHAT, **body):
    lines = [json.dumps(request(text, text, url=url, **body)).encode() for text in texts]
    shapes = [shape] * len(lines) if isinstance(shape, Shape) else list(shape)
    known = tuple(dict.fromkeys(shapes))
    index = tuple(known.index(each) for each in shapes)
    return Batch("m", None, (10,) * len(lines), tuple(lines), known, index)


@contextlib.contextmanager
def engine(server, **options):
    made = OpenAIEngine(url=server.url, **{"backoff_s": 0.001, "metrics": False, **options})
    made.load()
    try:
        yield made
    finally:
        made.close()


def run(made, given):
    """(results by index, the exception at the end)."""
    results, problem = {}, None
    try:
        results.update(pair for pair in made.run(given) if pair is not ROOM)
    except (ServerFault, EngineUnreachable, OutOfMemory) as raised:
        problem = raised
    return results, problem


def failing(bad, *, on="bad", times=None):
    """A script: items with the text `on` get `bad`, at most `times`, all others a good answer."""
    left = [10**9 if times is None else times]

    def script(url, body):
        if on in json.dumps(body) and left[0]:
            left[0] -= 1
            return bad(url, body) if callable(bad) else bad
        return completion(url, body)

    return script


def error_of(result):
    assert result.status == "failed"
    return json.loads(result.payload)


def slow_until(count):
    """(a script that answers `slow` when `count` others are done, what is done in order)."""
    done, slow = [], threading.Event()

    def script(url, body):
        text = body["messages"][-1]["content"]
        if text == "slow":
            assert slow.wait(30)
        done.append(text)
        if len(done) == count:
            slow.set()
        return completion(url, body)

    return script, done


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, EMBEDDINGS])
def test_each_endpoint_gets_its_answer(url):
    with faking() as server, engine(server) as made:
        results, problem = run(made, batch("a", "b", url=url))
    assert problem is None
    assert {result.status for result in results.values()} == {"ok"}
    assert len(json.loads(results[0].payload)["data" if url == EMBEDDINGS else "choices"]) == 1


BAD = {
    "500": error(500, "broken"),
    "html": Reply(200, b"<html><body>busy</body></html>"),
    "truncated json": Reply(200, b'{"choices": [{"index"'),
    "cut short": Reply(200, b'{"choices": [', then="cut"),
    "no choices": lambda url, body: completion(url, body, choices=0),
    "too many choices": lambda url, body: completion(url, body, choices=2),
    "not a list": reply({"choices": "none"}),
    "teapot": Reply(599, b""),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_fault_that_passes_is_tried_again_here(bad):
    with faking(failing(bad, times=1)) as server, engine(server) as made:
        results, problem = run(made, batch("good", "bad"))
    assert problem is None
    assert [results[k].status for k in (0, 1)] == ["ok", "ok"]
    assert len(server.asked) == 3


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_fault_that_stays_leaves_its_item_alone_without_a_result(bad):
    with faking(failing(bad)) as server, engine(server, tries=3, concurrency=2) as made:
        results, problem = run(made, batch("good1", "bad", "good2", "good3"))
    assert sorted(results) == [0, 2, 3]
    assert isinstance(problem, ServerFault)


def test_wrong_number_of_choices_says_both_numbers():
    script = functools.partial(completion, choices=1)
    with faking(script) as server, engine(server, tries=1) as made:
        results, problem = run(made, batch("a", n=3))
    assert not results
    assert "has 1 choices, and 3 were asked for" in str(problem)


def test_429_waits_as_told_and_asks_for_less():
    busy = failing(reply({"error": {"message": "slow down"}}, 429, Retry_After="0.001"), times=3)
    with faking(busy) as server, engine(server, concurrency=8) as made:
        results, problem = run(made, batch("bad"))
    assert problem is None
    assert results[0].status == "ok"
    assert len(server.asked) == 4
    assert made._driver._limit.value == 4


def test_429_for_ever_is_away_not_the_items_fault(monkeypatch):
    monkeypatch.setattr(httpdriver, "BUSY_S", 0.01)
    with faking(failing(error(429, "slow down"))) as server, engine(server) as made:
        results, problem = run(made, batch("bad", "bad too"))
    assert not results
    assert isinstance(problem, EngineUnreachable)


def test_429_without_credit_is_away_at_once(monkeypatch):
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.0)
    script = failing(error(429, "no money", code="insufficient_quota"))
    with faking(script) as server, engine(server) as made:
        _, problem = run(made, batch("bad"))
    assert isinstance(problem, EngineUnreachable)
    assert "no money" in str(problem)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_says_come_back_at_once_is_not_asked_for_ever(status, monkeypatch):
    monkeypatch.setattr(httpdriver, "BUSY_S", 0.01)
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.01)
    again = failing(reply({"error": {"message": "now"}}, status, Retry_After="0"))
    with faking(again) as server, engine(server, backoff_s=0.0) as made:
        _, problem = run(made, batch("bad"))
    assert isinstance(problem, EngineUnreachable)
    # 1, 2, 4 and 8 ms: then the bound is passed
    assert len(server.asked) == 5


REQUEST_FAULTS = {
    "bad request": (error(400, "temperature must be positive"), "bad_request"),
    "unprocessable": (error(422, "what?"), "bad_request"),
    "unknown model": (error(404, "no model of that name"), "bad_request"),
    "html 413": (Reply(413, b"<html>too large</html>"), "bad_request"),
    "not supported": (error(501, "no embeddings here"), "bad_request"),
    "content": (error(400, "filtered", code="content_filter"), "refused"),
    "moderation": (error(403, "flagged", code="content_policy_violation"), "refused"),
}


@pytest.mark.parametrize(("bad", "code"), REQUEST_FAULTS.values(), ids=REQUEST_FAULTS)
def test_a_fault_of_the_request_is_final_and_sent_once(bad, code):
    with faking(failing(bad)) as server, engine(server) as made:
        results, problem = run(made, batch("good", "bad"))
    assert problem is None
    assert results[0].status == "ok"
    assert error_of(results[1])["code"] == code
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "bad",
    [
        error(400, "no", code="context_length_exceeded"),
        error(400, "request (9 tokens) exceeds the available context size (8 tokens)"),
        error(400, "no", type="exceed_context_size_error"),
        error(400, "This model's maximum context length is 4096 tokens. However, you asked for"),
        error(400, "The decoder prompt (length 9) is longer than the maximum model length of 8."),
    ],
)
def test_too_long_is_marked_and_final(bad):
    with faking(failing(bad)) as server, engine(server) as made:
        results, problem = run(made, batch("bad"))
    assert problem is None
    assert results[0] == Result.too_long()


UNROUTED = {
    "vllm": reply({"detail": "Not Found"}, 404),
    "post": reply({"detail": "Method Not Allowed"}, 405),
    "llama.cpp": error(404, "File Not Found", type="not_found_error"),
    "openai": error(404, "Invalid URL (POST /v2/v1/chat/completions)"),
}


@pytest.mark.parametrize("bad", UNROUTED.values(), ids=UNROUTED)
def test_a_wrong_address_ends_no_item(bad):
    with faking(failing(bad)) as server, engine(server) as made:
        server.documents.clear()
        results, problem = run(made, batch("bad"))
    assert not results
    assert isinstance(problem, EngineUnreachable)
    assert "look at --url" in str(problem)


@pytest.mark.parametrize("bad", UNROUTED.values(), ids=UNROUTED)
def test_a_path_that_a_server_has_not_is_the_fault_of_who_asks_for_it(bad):
    with faking(failing(bad)) as server, engine(server) as made:
        results, problem = run(made, batch("good", "bad"))
    assert problem is None
    assert error_of(results[1])["code"] == "bad_request"


@pytest.mark.parametrize(
    "bad",
    [
        error(401, "bad key"),
        error(402, "Insufficient Balance"),
        Reply(404, b"<html>nothing</html>"),
        Reply(503, b"loading"),
    ],
)
def test_what_no_item_is_to_blame_for_charges_nobody(bad, monkeypatch):
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.002)
    with faking(failing(bad)) as server, engine(server) as made:
        results, problem = run(made, batch("bad"))
    assert not results
    assert isinstance(problem, EngineUnreachable)


def test_a_server_that_is_not_there_charges_nobody(monkeypatch):
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.002)
    with faking() as server, engine(server) as made:
        server.kill()
        results, problem = run(made, batch("a", "b"))
        assert not results
        assert isinstance(problem, EngineUnreachable)
        server.start()
        results, problem = run(made, batch("a", "b"))
    assert problem is None
    assert len(results) == 2


def test_a_server_that_dies_charges_what_it_had_and_sends_no_more(monkeypatch):
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.002)
    server_of = []

    def script(url, body):
        if "bad" in json.dumps(body):
            server_of[0].kill()
            return Reply(then="drop")
        return completion(url, body)

    with faking(script) as server, engine(server, concurrency=1) as made:
        server_of.append(server)
        results, problem = run(made, batch("good", "bad", "never sent"))
        server.start()
    assert sorted(results) == [0]
    assert isinstance(problem, ServerFault)
    assert "the server was lost with this item" in str(problem)
    assert not any("never sent" in json.dumps(asked) for asked in server.asked)


def test_a_connection_that_breaks_once_is_no_death():
    with faking(failing(Reply(then="drop"), times=1)) as server, engine(server) as made:
        results, problem = run(made, batch("bad"))
    assert problem is None
    assert results[0].status == "ok"


def test_an_item_that_hangs_is_its_own_fault_where_the_server_answers_others():
    with faking(failing(Reply(then="hang"))) as server:
        with engine(server, timeout_s=0.2, concurrency=4) as made:
            results, problem = run(made, batch("bad", "good"))
        assert sorted(results) == [1]
        assert isinstance(problem, ServerFault)
        assert "no answer within 0.2 s" in str(problem)


def test_a_server_that_hangs_as_a_whole_charges_nobody(monkeypatch):
    monkeypatch.setattr(httpdriver, "PROBE_S", 0.1)
    with faking(failing(Reply(then="hang"))) as server, engine(server, timeout_s=0.1) as made:
        server.hangs = True
        results, problem = run(made, batch("bad"))
    assert not results
    assert isinstance(problem, EngineUnreachable)


def test_out_of_memory_is_told_as_such():
    script = failing(error(500, "CUDA out of memory. Tried to allocate"))
    with faking(script) as server, engine(server) as made:
        results, problem = run(made, batch("good", "bad"))
    assert sorted(results) == [0]
    assert isinstance(problem, OutOfMemory)


def test_a_payload_that_is_no_request_never_reaches_the_server():
    with faking() as server, engine(server) as made:
        given = Batch(
            "m", None, (1, 1), (b"\xff", b'{"url": "/v1/x", "body": {}}'), (SHAPE,), (0, 0)
        )
        results, problem = run(made, given)
    assert problem is None
    assert {error_of(result)["code"] for result in results.values()} == {"bad_request"}
    assert not server.asked


def test_the_first_item_of_a_cold_shape_goes_alone_and_the_next_batch_is_warm():
    gate, order = threading.Barrier(3, timeout=30), []

    def script(url, body):
        text = body["messages"][-1]["content"]
        order.append((text, server.now))
        if text != "first":
            gate.wait()
        return completion(url, body)

    with faking(script) as server, engine(server, concurrency=3) as made:
        results, problem = run(made, batch("first", "b", "c", "d"))
        assert problem is None
        assert order[0] == ("first", 1)
        assert len(results) == 4
        # warm now: three at once from the first item on, or the gate would not open
        results, problem = run(made, batch("e", "f", "g"))
    assert problem is None
    assert server.most == 3


def test_places_are_refilled_as_they_come_free():
    """The second place serves three items while the first holds one."""
    script, done = slow_until(3)
    plain = Shape("m")
    with faking(script) as server, engine(server, concurrency=2) as made:
        results, problem = run(made, batch("slow", "a", "b", "c", shape=plain))
    assert problem is None
    assert len(results) == 4
    assert done[-1] == "slow"
    assert server.most == 2


def test_a_slow_item_leaves_its_places_to_the_next_batch():
    slow = threading.Event()

    def script(url, body):
        if body["messages"][-1]["content"] == "slow":
            assert slow.wait(30)
        return completion(url, body)

    plain = Shape("m")
    with faking(script) as server, engine(server, concurrency=2) as made:
        first = made.run(batch("slow", "a", shape=plain))
        given = [next(first), next(first)]
        assert ROOM in given
        # whole batches run beside the slow item, which holds one place of two
        for texts in (("b", "c", "d"), ("e", "f")):
            results, problem = run(made, batch(*texts, shape=plain))
            assert problem is None
            assert len(results) == len(texts)
        slow.set()
        given += list(first)
    assert sorted(pair[0] for pair in given if pair is not ROOM) == [0, 1]
    assert server.most == 2


def test_a_batch_that_is_given_up_frees_its_places():
    held = threading.Event()

    def script(url, body):
        if body["messages"][-1]["content"] == "held":
            held.wait(30)
        return completion(url, body)

    with faking(script) as server, engine(server, concurrency=1) as made:
        first = made.run(batch("held", shape=Shape("m")))
        assert next(first) is ROOM
        first.close()
        results, problem = run(made, batch("a", shape=Shape("m")))
        held.set()
    assert (len(results), problem) == (1, None)


def test_cached_tokens_are_summed_and_unknown_until_told():
    told = iter([{}, {}, {"prompt_tokens_details": {"cached_tokens": 8}}, {}])
    lock = threading.Lock()

    def script(url, body):
        with lock:
            return completion(url, body, **next(told))

    with faking(script) as server, engine(server, concurrency=1) as made:
        run(made, batch("a", "b"))
        assert made.cache_stats() is None
        run(made, batch("c", "d"))
        stats = made.cache_stats()
    assert (stats.queries_tokens, stats.hits_tokens, stats.measured_by) == (40, 8, "engine")


def test_sums_that_differ_from_the_servers_counters_are_said(capsys):
    def counted(hits):
        return (
            b'vllm:prefix_cache_queries_total{m="x"} 20\nvllm:prefix_cache_hits_total %d\n' % hits
        )

    usage = {"prompt_tokens_details": {"cached_tokens": 5}}
    for hits, said in ((10, False), (2, True)):
        with faking(lambda url, body: completion(url, body, **usage)) as server:
            server.documents["/metrics"] = (
                b"vllm:prefix_cache_queries_total 0\nvllm:prefix_cache_hits_total 0\n"
            )
            with engine(server, metrics=True) as made:
                run(made, batch("a", "b"))
                server.documents["/metrics"] = counted(hits)
        assert ("answers say 10 of 20" in capsys.readouterr().err) is said


def test_the_key_comes_from_a_file_and_is_in_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    key = tmp_path / "key"
    key.write_text("very-secret\n")
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.0)
    with faking(failing(error(401, "who are you"))) as server:
        with engine(server, api_key_file=str(key)) as made:
            _, problem = run(made, batch("bad"))
        with engine(server) as made:
            run(made, batch("good"))
    assert [each["Authorization"] for each in server.headers] == [
        "Bearer very-secret", "Bearer from-environment"
    ]  # fmt: skip
    assert "very-secret" not in str(problem) + repr(made)
    key.write_text("tö\x00")
    with pytest.raises(ConfigError, match="no header can carry") as caught:
        OpenAIEngine(api_key_file=str(key)).load()
    assert "tö" not in str(caught.value)


SECRET = "sk-very/secret+key-" + "x" * 40


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 429, 500, 503])
@pytest.mark.parametrize("spelled", ["message", "bare", "torn", "far"])
def test_a_server_that_echoes_the_key_is_quoted_without_it(status, spelled, tmp_path, monkeypatch):
    monkeypatch.setattr(httpdriver, "AWAY_S", 0.0)
    monkeypatch.setattr(httpdriver, "BUSY_S", 0.0)
    (tmp_path / "key").write_text(SECRET)
    echo = {
        "message": json.dumps({"error": {"message": f"header Bearer {SECRET}"}}),
        "bare": f"<html>Authorization: Bearer {SECRET}</html>",
        "torn": json.dumps({"said": SECRET}).replace("/", "\\/")[:-1],
        # cut where the excerpt, or the message, ends
        "far": json.dumps({"error": {"message": "." * 480 + SECRET}}),
    }[spelled]
    options = {"api_key_file": str(tmp_path / "key"), "tries": 1}
    script = failing(Reply(status, echo.encode()))
    with faking(script) as server, engine(server, **options) as made:
        results, problem = run(made, batch("bad"))
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    said = str(problem) + "".join(each.payload.decode() for each in results.values())
    assert "secret" in said or spelled == "far"
    assert "sk-very" not in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "ftp://x"}, "must begin with http"),
        ({"concurrency": "1000"}, "at most 256"),
        ({"cached_tokens": "maybe"}, "auto, yes, no"),
        ({"tries": "0"}, "at least 1"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        engine_factory("openai", options)


def test_the_servers_own_name_of_the_model_is_sent():
    with faking() as server, engine(server, served_model="org/big") as made:
        run(made, batch("a"))
    assert server.asked[0]["model"] == "org/big"


def test_concurrency_is_what_a_llama_server_says():
    with faking() as server:
        server.documents["/props"] = b'{"total_slots": 3}'
        with engine(server) as made:
            assert made._driver._limit.value == 3


# -- through a broker -------------------------------------------------------------------------


def through_a_broker(tmp_path, script, rows, *, during=None, **options):
    """Run `rows` against a server with `script`; (results, failures by custom_id, ledger)."""
    source = write_batch(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    with faking(script) as server, brokering() as broker:
        if during is not None:
            during(server)
        factory = functools.partial(
            OpenAIEngine, url=server.url, **{"backoff_s": 0.001, "metrics": False, **options}
        )
        contract = Contract(8, 8_192, 1_024, ragged=True)
        with serving(factory, broker.address, contract=contract):
            run_batch(source, output, broker=broker.address, stall_timeout_s=60)
        with operating(broker.address) as client:
            status = client.request("status", 10)
    results = {row["custom_id"]: row for row in read_rows(output)}
    failures = {row["custom_id"]: row for row in read_rows(tmp_path / "out.errors.jsonl")}
    return results, failures, status


@pytest.mark.e2e
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_through_a_broker_a_faulty_answer_loses_nothing(bad, tmp_path):
    """The item that the server always fails at is dead after its attempts; all others are done."""
    rows = [request(f"good-{k}") for k in range(12)] + [request("bad-1", "bad")]
    results, failures, status = through_a_broker(tmp_path, failing(bad), rows, tries=1)
    assert sorted(results) == sorted(f"good-{k}" for k in range(12))
    assert failures["bad-1"]["error"]["code"] == "dead"
    assert status["residual_items"] == 0


@pytest.mark.e2e
def test_through_a_broker_a_slow_item_does_not_hold_up_the_next_batch(tmp_path):
    """The second batch is whole while an item of the first is still at the server."""
    script, done = slow_until(15)
    rows = [request("slow", "slow")] + [request(f"q-{k}", f"item {k}") for k in range(15)]
    results, failures, status = through_a_broker(tmp_path, script, rows, concurrency=2)
    assert (len(results), len(failures), status["residual_items"]) == (16, 0, 0)
    assert done[-1] == "slow"


@pytest.mark.e2e
def test_through_a_broker_an_item_that_hangs_holds_nobody_else_and_is_dead_in_the_end(tmp_path):
    rows = [request(f"good-{k}") for k in range(12)] + [request("bad-1", "bad")]
    script = failing(Reply(then="hang"))
    results, failures, status = through_a_broker(tmp_path, script, rows, timeout_s=0.3)
    assert sorted(results) == sorted(f"good-{k}" for k in range(12))
    assert failures["bad-1"]["error"]["code"] == "dead"
    assert "no answer within 0.3 s" in failures["bad-1"]["error"]["message"]
    assert status["residual_items"] == 0


@pytest.mark.e2e
@pytest.mark.parametrize("status_code", [429, 503])
def test_through_a_broker_a_busy_server_is_waited_for_and_charges_nobody(status_code, tmp_path):
    busy = failing(error(status_code, "slow down"), on="hello", times=10)
    rows = [request(f"q-{k}", f"hello {k}") for k in range(40)]
    results, failures, status = through_a_broker(tmp_path, busy, rows, concurrency=8)
    assert len(results) == 40
    assert not failures
    assert (status["residual_items"], status["dead_items"]) == (0, 0)


@pytest.mark.e2e
def test_through_a_broker_a_server_that_dies_and_comes_back_loses_nothing(tmp_path):
    """It dies in the middle of an item, refuses connections for a while, and starts again."""
    died = threading.Event()
    servers = []

    def script(url, body):
        if "item 20" in json.dumps(body) and not died.is_set():
            died.set()
            servers[0].kill()
            threading.Timer(0.3, servers[0].start).start()
            return Reply(then="drop")
        return completion(url, body)

    rows = [request(f"q-{k}", f"item {k}") for k in range(40)]
    results, failures, status = through_a_broker(tmp_path, script, rows, during=servers.append)
    assert died.is_set()
    assert len(results) == 40
    assert not failures
    assert status["residual_items"] == 0


@pytest.mark.e2e
def test_through_a_broker_every_kind_of_error_has_its_row(tmp_path):
    def script(url, body):
        text = body["messages"][-1]["content"]
        answers = {
            "long": error(400, "no", code="context_length_exceeded"),
            "refused": error(400, "filtered", code="content_filter"),
            "wrong": error(400, "what?"),
            "hungry": error(500, "out of memory"),
        }
        return answers.get(text) or completion(url, body)

    texts = ("fine", "long", "refused", "wrong", "hungry")
    rows = [request(text, text) for text in texts]
    results, failures, _ = through_a_broker(tmp_path, script, rows)
    assert sorted(results) == ["fine", "long"]
    body = results["long"]["response"]["body"]
    assert body["zfabric"] == {"too_long": True}
    assert body["choices"][0]["message"]["content"] == ""
    codes = {name: row["error"]["code"] for name, row in failures.items()}
    assert codes == {"refused": "refused", "wrong": "bad_request", "hungry": "dead"}


@pytest.mark.e2e
def test_through_a_broker_the_hit_rate_is_what_the_answers_say(tmp_path):
    usage = {"prompt_tokens_details": {"cached_tokens": 8}}
    rows = [request(f"q-{k}") for k in range(20)]
    source = write_batch(tmp_path / "in.jsonl", rows)
    with faking(lambda url, body: completion(url, body, **usage)) as server, brokering() as broker:
        factory = functools.partial(OpenAIEngine, url=server.url, metrics=False)
        with serving(factory, broker.address, contract=Contract(8, 8_192, 1_024, ragged=True)):
            run_batch(source, tmp_path / "out.jsonl", broker=broker.address)
            with operating(broker.address) as client:
                until(lambda: client.request("workers", 10)[0]["cache_hit_ratio"] == 0.8)
