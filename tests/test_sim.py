from __future__ import annotations

import base64
import json
import math
import pickle
import signal
import struct
import time
from multiprocessing.connection import wait

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

import zfabric_workers
from zfabric.engine import Batch, OutOfMemory, Result
from zfabric.engine_child import EngineChild, Exited, Results
from zfabric.errors import ConfigError
from zfabric.shapes import Shape
from zfabric_workers import describe_options, engine_factory, options_of
from zfabric_workers.sim import WORDS, PrefixCache, SimEngine, answer, chain_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


def request(url, **body):
    line = {"custom_id": "q-1", "method": "POST", "url": url, "body": {"model": "tiny"} | body}
    return json.dumps(line).encode()


def chat(text="hello", **body):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    return request(CHAT, messages=messages, **body)


def batch(*items, pad_to=None):
    """A batch of (payload, shape, length)."""
    shapes = tuple(dict.fromkeys(shape for _, shape, _ in items))
    return Batch(
        model="tiny",
        pad_to=pad_to,
        lengths=tuple(length for _, _, length in items),
        payloads=tuple(payload for payload, _, _ in items),
        shapes=shapes,
        shape_index=tuple(shapes.index(shape) for _, shape, _ in items),
    )


def plain(*payloads, pad_to=None):
    return batch(*((payload, Shape("tiny"), 10) for payload in payloads), pad_to=pad_to)


def fast(**options):
    return SimEngine(speed=0.0, **options)


def body_of(payload):
    result = answer(payload, "tiny")
    assert result.status == "ok", result
    return json.loads(result.payload)


def refusal_of(payload):
    result = answer(payload, "tiny")
    assert result.status == "failed"
    told = json.loads(result.payload)
    assert told["code"] == "bad_request"
    return told["message"]


@pytest.fixture
def slept_s(monkeypatch):
    """The seconds that the engine would have slept."""
    sleeps = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    return sleeps


# The cache


class NaiveCache:
    """The same policy said plainly: chains as tuples, the oldest leaf goes first."""

    def __init__(self, capacity_tokens):
        self.capacity_tokens = capacity_tokens
        self.nodes = {}  # chain of components -> [size, last use]
        self.clock = 0

    def used_tokens(self):
        return sum(size for size, _ in self.nodes.values())

    def take(self, chain, sizes):
        self.clock += 1
        prefixes = [chain[: depth + 1] for depth in range(len(chain))]
        hit_tokens = 0
        for prefix in prefixes:
            if prefix not in self.nodes:
                break
            hit_tokens += self.nodes[prefix][0]
        fitting_tokens = 0
        wanted = []
        for prefix in prefixes:
            size = self.nodes[prefix][0] if prefix in self.nodes else sizes[prefix[-1]]
            fitting_tokens += size
            if fitting_tokens > self.capacity_tokens:
                break
            wanted.append((prefix, size))
        for prefix, size in wanted:
            self.nodes[prefix] = [size, self.clock]
        while self.used_tokens() > self.capacity_tokens:
            parents = {prefix[:-1] for prefix in self.nodes}
            leaves = [prefix for prefix in self.nodes if prefix not in parents]
            del self.nodes[min(leaves, key=lambda leaf: self.nodes[leaf][1])]
        return hit_tokens


SIZES = {0: 1, 1: 2, 2: 3, 3: 5, 4: 8, 5: 40}


@given(
    st.integers(0, 40),
    st.lists(st.lists(st.sampled_from(sorted(SIZES)), max_size=5).map(tuple), max_size=60),
)
def test_cache_equals_a_naive_tree_that_drops_its_oldest_leaf(capacity_tokens, chains):
    cache, naive = PrefixCache(capacity_tokens), NaiveCache(capacity_tokens)
    for components in chains:
        tokens = tuple(SIZES[component] for component in components)
        chain = chain_of(Shape("tiny", components, tokens), 0)
        assert cache.take(chain) == naive.take(components, SIZES)
        assert cache.used_tokens == naive.used_tokens() <= capacity_tokens
        for depth, (node, _) in enumerate(chain):
            assert (node in cache) == (components[: depth + 1] in naive.nodes)


def test_component_larger_than_the_cache_is_never_cached_nor_what_follows_it():
    cache = PrefixCache(10)
    chain = chain_of(Shape("tiny", (1, 2, 3), (4, 11, 1)), 0)
    assert [cache.take(chain) for _ in range(3)] == [0, 4, 4]
    assert cache.used_tokens == 4


def test_components_of_no_tokens_do_not_fill_memory():
    cache = PrefixCache(100)
    for component in range(1000):
        assert cache.take(chain_of(Shape("tiny", (component,), (0,)), 0)) == 0
    assert cache.used_tokens == 100


def test_undeclared_token_counts_are_taken_as_the_option_says():
    engine = fast(unknown_tokens=6)
    item = (b"x", Shape.of("tiny", "a", "b", tokens=[5, None]), 30)
    engine.run(batch(item, item))
    stats = engine.cache_stats()
    assert (stats.queries_tokens, stats.hits_tokens, stats.measured_by) == (60, 11, "simulated")


def test_no_more_is_hit_than_the_item_has():
    engine = fast(unknown_tokens=500)
    engine.run(batch(*[(b"x", Shape.of("tiny", "a"), 30)] * 2))
    assert engine.cache_stats().hits_tokens == 30


def test_order_decides_the_hits_when_the_prefixes_do_not_all_fit():
    shapes = [Shape.of("tiny", f"prefix {k}", tokens=[100]) for k in range(4)]
    grouped = [(b"x", shape, 120) for shape in shapes for _ in range(10)]
    interleaved = [(b"x", shape, 120) for _ in range(10) for shape in shapes]
    hits = []
    for items in (grouped, interleaved):
        engine = fast(cache_tokens=300)
        engine.run(batch(*items))
        assert engine.cache_stats().queries_tokens == 40 * 120
        hits.append(engine.cache_stats().hits_tokens)
    assert hits == [4 * 9 * 100, 0]


def test_load_empties_cache_and_counters():
    engine = fast()
    item = (b"x", Shape.of("tiny", "a", tokens=[5]), 9)
    engine.run(batch(item))
    engine.load()
    engine.run(batch(item))
    assert engine.cache_stats().hits_tokens == 0
    assert engine.cache_stats().queries_tokens == 9


# The cost


def test_cost_is_batch_padding_and_missed_prefix(slept_s):
    engine = SimEngine(batch_us=1000, token_us=10, miss_token_us=100)
    shape = Shape.of("tiny", "a", tokens=[4])
    items = [(b"x", shape, 10), (b"y", shape, 14)]
    engine.run(batch(*items, pad_to=16))
    engine.run(batch(*items, pad_to=16))
    engine.run(batch(*items))
    assert slept_s == pytest.approx([1320e-6 + 400e-6, 1320e-6, 1240e-6])


def test_speed_divides_the_cost_and_zero_does_not_sleep(slept_s):
    SimEngine(batch_us=1000, token_us=0, speed=4).run(plain(b"x"))
    fast(batch_us=1000).run(plain(b"x"))
    assert slept_s == pytest.approx([250e-6, 0])


def test_jitter_is_bounded_and_repeats_with_its_seed(slept_s):
    for seed in (1, 1, 2):
        engine = SimEngine(batch_us=1e6, token_us=0, jitter=0.25, seed=seed)
        for _ in range(20):
            engine.run(plain(b"x"))
    assert all(0.75 <= cost_s <= 1.25 for cost_s in slept_s)
    assert slept_s[:20] == slept_s[20:40] != slept_s[40:]


def test_partial_results_spread_the_cost_and_equal_the_whole(slept_s):
    payloads = (chat("a"), chat("b"), b"c")
    options = {"batch_us": 3e6, "token_us": 0}
    pairs = list(SimEngine(partial=True, **options).run(plain(*payloads)))
    assert slept_s == pytest.approx([1.0] * 3)
    assert [index for index, _ in pairs] == [0, 1, 2]
    assert [result for _, result in pairs] == SimEngine(**options).run(plain(*payloads))


def test_slow_item_adds_its_time(slept_s):
    SimEngine(batch_us=0, token_us=0, slow_on=b"snail", slow_s=2.5).run(plain(b"snail", b"x"))
    assert slept_s == [2.5]


# The answers


def test_chat_body_is_valid_labelled_and_counts_its_tokens():
    body = body_of(chat("hello", model="other/model"))
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.system_fingerprint == "zfabric-sim"
    assert completion.model == "other/model"
    (choice,) = completion.choices
    words = choice.message.content.split()
    assert set(words) <= set(WORDS)
    assert choice.finish_reason == "stop"
    usage = completion.usage
    assert usage.prompt_tokens == math.ceil(len("be brief" + "hello") / 4)
    assert usage.completion_tokens == len(words)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is None


def test_chat_takes_parts_tools_and_several_choices():
    parts = [{"role": "user", "content": [{"type": "text", "text": "abcd"}, {"type": "image_url"}]}]
    call = {"role": "assistant", "content": None, "tool_calls": []}
    body = body_of(request(CHAT, messages=[*parts, call], tools=[{"type": "function"}], n=3))
    completion = ChatCompletion.model_validate(body, strict=True)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in completion.choices}) == 3


@pytest.mark.parametrize(("limit", "reason"), [(0, "length"), (2, "length"), (100, "stop")])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_text_is_cut_at_the_limit(name, limit, reason):
    completion = ChatCompletion.model_validate(body_of(chat(**{name: limit})), strict=True)
    assert completion.choices[0].finish_reason == reason
    assert completion.usage.completion_tokens == len(completion.choices[0].message.content.split())
    assert completion.usage.completion_tokens <= limit


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
)
def test_completion_body_has_a_choice_for_each_prompt(prompt, choices):
    completion = Completion.model_validate(
        body_of(request(COMPLETIONS, prompt=prompt, n=2)), strict=True
    )
    assert [choice.index for choice in completion.choices] == list(range(2 * choices))
    assert completion.system_fingerprint == "zfabric-sim"


def test_embeddings_are_unit_vectors_in_both_encodings():
    floats = CreateEmbeddingResponse.model_validate(
        body_of(request(EMBEDDINGS, input=["a", "b"], dimensions=5)), strict=True
    )
    assert floats.system_fingerprint == "zfabric-sim"
    assert [item.index for item in floats.data] == [0, 1]
    first, second = (item.embedding for item in floats.data)
    assert len(first) == 5
    assert math.hypot(*first) == pytest.approx(1)
    assert first != second
    packed = body_of(request(EMBEDDINGS, input="a", dimensions=5, encoding_format="base64"))
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack("<5f", raw) == pytest.approx(first)


def test_answer_depends_on_the_prompt_alone():
    payloads = [chat("a"), chat("b"), b"opaque", request(COMPLETIONS, prompt="p")]
    shape = Shape.of("tiny", "a", tokens=[5])
    items = [(payload, shape, 40) for payload in payloads]
    together = fast().run(batch(*items))
    backwards = fast(seed=9, cache_tokens=0).run(batch(*items[::-1], pad_to=64))[::-1]
    alone = [fast().run(batch(item))[0] for item in items]
    assert together == backwards == alone
    assert len(set(together)) == len(payloads)


def test_answers_of_this_version_are_pinned():
    assert answer(b"opaque", "m").payload == b"sim:c492fe62022b3cde53dedec2037c2992"
    message = body_of(chat("hello"))["choices"][0]["message"]
    assert message["content"].startswith("willow dune brook delta quarry")


def test_body_without_a_model_is_labelled_with_the_engines():
    line = {"url": COMPLETIONS, "body": {"prompt": "x"}}
    (result,) = fast(model="mine").run(plain(json.dumps(line).encode()))
    assert json.loads(result.payload)["model"] == "mine"


@pytest.mark.parametrize("payload", [b"", b"text", b"\xff\xfe", b"[1]", b"null", b'{"a": 1}'])
def test_other_payloads_get_a_digest(payload):
    result = answer(payload, "tiny")
    assert result.status == "ok"
    assert result.payload.startswith(b"sim:")
    assert len(result.payload) == 4 + 32


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"url": "\xff"}', "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"url": "/v1/completions"}', "body must be an object"),
        (request("/v1/audio", prompt="x"), "url must be one of"),
        (b'{"url": ["/v1/completions"], "body": {}}', "url must be one of"),
        (b'{"method": "GET", "url": "/v1/completions", "body": {}}', "method must be POST"),
        (request(COMPLETIONS, prompt="x", model=7), "model must be"),
        (request(COMPLETIONS, prompt="x", stream=True), "stream"),
        (request(COMPLETIONS), "prompt must be"),
        (request(COMPLETIONS, prompt=[]), "prompt must be"),
        (request(COMPLETIONS, prompt=["x"] * 129), "prompt must be"),
        (request(COMPLETIONS, prompt=["x", 1]), "prompt must be"),
        (request(COMPLETIONS, prompt=["x"] * 100, n=2), "more than 128 choices"),
        (request(EMBEDDINGS, input=[[]]), "input must be"),
        (request(EMBEDDINGS, input="x", dimensions=0), "dimensions must be"),
        (request(EMBEDDINGS, input="x", encoding_format="int8"), "encoding_format"),
        (request(CHAT), "messages must be"),
        (request(CHAT, messages=["hi"]), "each message"),
        (request(CHAT, messages=[{"role": "user", "content": 4}]), "content must be"),
        (chat(n=0), "n must be"),
        (chat(n=True), "n must be"),
        (chat(max_tokens=-1), "max_tokens must be"),
        (chat(max_tokens="4"), "max_tokens must be"),
    ],
)
def test_bad_request_fails_its_item_alone(payload, reason):
    assert reason in refusal_of(payload)
    first, second = fast().run(plain(payload, b"neighbour"))
    assert (first.status, second.status) == ("failed", "ok")


def test_lone_surrogates_are_answered():
    body_of(chat("\ud800", model="\udfff"))


# The switches


def test_items_that_fail_on_purpose_leave_their_neighbours():
    results = fast(fail_on=b"bad").run(plain(b"good", b"a bad one", b"good"))
    assert [result.status for result in results] == ["ok", "failed", "ok"]
    assert json.loads(results[1].payload)["code"] == "simulated_failure"


def test_every_nth_item_fails_across_batches():
    engine = fast(fail_every=3)
    statuses = [r.status for _ in range(3) for r in engine.run(plain(b"a", b"b"))]
    assert statuses == ["ok", "ok", "failed", "ok", "ok", "failed"]


def test_switches_that_raise():
    engine = fast(oom_on=b"huge", error_on=b"crash")
    with pytest.raises(OutOfMemory):
        engine.run(plain(b"x", b"huge"))
    with pytest.raises(RuntimeError):
        engine.run(plain(b"crash"))
    assert engine.run(plain(b"x"))[0].status == "ok"


def test_killed_and_hung_cards_in_a_real_process():
    options = {"kill_on": "poison", "hang_on": "hang", "hang_s": "0.3", "partial": "yes"}
    child = EngineChild(engine_factory("sim", options | {"speed": "0"}))
    child.start()
    try:
        while not child.idle:
            assert wait(child.waitables(), 30)
            child.receive()
        began = time.monotonic()
        child.send(1, plain(b"hang"))
        while not child.idle:
            assert wait(child.waitables(), 30)
            child.receive()
        assert time.monotonic() - began >= 0.29
        child.send(2, plain(b"first", b"poison"))
        events = []
        while child.running:
            assert wait(child.waitables(), 30)
            events += child.receive()
    finally:
        child.kill()
        child.stop(0)
    assert events == [
        Results(2, (0,), ("ok",), (answer(b"first", "").payload,), final=False),
        Exited(-signal.SIGKILL, "killed by SIGKILL", (2,)),
    ]


# Options and the registry


def test_options_are_parsed_by_the_kind_of_their_default():
    engine = SimEngine.from_options(
        {"model": "m", "cache_tokens": "1_000", "token_us": "0.5", "partial": "No", "fail_on": "é"}
    )
    same = SimEngine(
        model="m", cache_tokens=1000, token_us=0.5, partial=False, fail_on="é".encode()
    )
    assert repr(engine) == repr(same)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache_token": "1"}, "did you mean cache_tokens?"),
        ({"zzz": "1"}, "known are model, cache_tokens"),
        ({"_cache": "1"}, "unknown engine option '_cache'"),
        ({"cache_tokens": "many"}, "cache_tokens must be an integer, not 'many'"),
        ({"cache_tokens": "-1"}, "cache_tokens must be at least 0"),
        ({"token_us": "nan"}, "token_us must be finite"),
        ({"token_us": ""}, "token_us must be a number"),
        ({"partial": "maybe"}, "partial must be true or false"),
        ({"jitter": "1.5"}, "jitter must be at most 1"),
        ({"model": ""}, "model name"),
    ],
)
def test_unusable_option_is_a_configuration_error_that_names_it(options, text):
    with pytest.raises(ConfigError) as raised:
        engine_factory("sim", options)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [{"cache_tokens": 1.5}, {"cache_tokens": True}, {"fail_on": "text"}, {"partial": 1}],
)
def test_options_of_the_wrong_type_are_refused_in_python_too(options):
    with pytest.raises(ConfigError):
        SimEngine(**options)


def test_unknown_engine_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown engine 'simm'; known are .*sim"):
        engine_factory("simm", {})


def test_factory_travels_and_makes_a_new_engine_each_time():
    factory = pickle.loads(pickle.dumps(engine_factory("sim", {"cache_tokens": "7"})))
    assert repr(factory()) == repr(SimEngine(cache_tokens=7))
    assert factory() is not factory()


def test_help_describes_every_option():
    rows = describe_options("sim")
    assert [name for name, _, _ in rows] == [each.name for each in options_of(SimEngine)]
    assert ("partial", "false", "give results one by one, the cost spread over them") in rows
    assert all(text and len(text) < 90 for _, _, text in rows)


def test_registry_names_what_can_be_imported():
    for name in zfabric_workers.ENGINES:
        assert options_of(zfabric_workers.engine_class(name))


def test_result_of_the_simulation_is_a_result():
    assert isinstance(answer(b"x", "m"), Result)
