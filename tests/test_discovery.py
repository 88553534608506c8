from __future__ import annotations

import io
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.running import FAST, brokering, operating, serving, zfabric
from zfabric.batchfile import BadLine, Discovery, Request, estimate_tokens, read_requests
from zfabric.batchfile.chains import BLOCK_CHARS, CHAT, COMPLETIONS, EMBEDDINGS
from zfabric.batchfile.discovery import COUNT_MIN, FrequentNodes
from zfabric.batchrun import run_batch
from zfabric.cli.prompts import BBH
from zfabric.shapes import COMPONENTS_MAX, LABEL_BYTES_MAX

ROOT = Path(__file__).resolve().parents[1]


def stream_of(bodies, url=CHAT, **extra):
    lines = [
        {
            "custom_id": f"q-{k}",
            "method": "POST",
            "url": url,
            "body": {"model": "m", **body},
            **extra,
        }
        for k, body in enumerate(bodies)
    ]
    return io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def found(bodies, url=CHAT, extra=None, **options):
    return list(Discovery(**options).assign(read_requests(stream_of(bodies, url, **(extra or {})))))


def chat(system, user, **more):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, **more}


def text_of(seed, chars):
    draw = random.Random(seed)
    return "".join(draw.choice("abcdefghij klmnop") for _ in range(chars))


# -- chains ------------------------------------------------------------------------------------


def parsed(body, url=CHAT):
    (row,) = read_requests(stream_of([body], url))
    assert isinstance(row, Request)
    return row


def test_a_chain_is_tools_then_leading_messages_then_blocks_of_the_last():
    user = text_of(1, 2 * BLOCK_CHARS + 10)
    assert len(parsed(chat("s", user)).shape.components) == 3
    assert len(parsed(chat("s", user, tools=[{"type": "function"}])).shape.components) == 4
    assert len(parsed(chat("s", "short")).shape.components) == 1


def test_a_chain_never_has_more_pieces_than_a_shape_can():
    row = parsed({"prompt": text_of(1, BLOCK_CHARS * (COMPONENTS_MAX + 9))}, COMPLETIONS)
    assert len(row.shape.components) == COMPONENTS_MAX
    messages = [{"role": "user", "content": str(k)} for k in range(COMPONENTS_MAX + 9)]
    assert len(parsed({"messages": messages}).shape.components) == COMPONENTS_MAX


def test_pieces_add_up_to_the_length_of_a_plain_prompt():
    text = text_of(1, 3 * BLOCK_CHARS)
    row = parsed({"prompt": text}, COMPLETIONS)
    assert sum(row.shape.tokens) == row.length_tokens == estimate_tokens(text)


def test_who_says_a_text_is_part_of_what_is_shared():
    text = text_of(1, BLOCK_CHARS)
    one = parsed({"messages": [{"role": "user", "content": text}]})
    other = parsed({"messages": [{"role": "system", "content": text}]})
    assert one.shape.components != other.shape.components


@pytest.mark.parametrize(
    ("body", "url"),
    [
        ({"input": text_of(1, 2_000)}, EMBEDDINGS),
        ({"prompt": [text_of(1, 2_000), text_of(2, 2_000)]}, COMPLETIONS),
    ],
)
def test_what_no_engine_shares_has_no_chain(body, url):
    row = parsed(body, url)
    assert row.shape.components == ()
    assert row.length_tokens >= 500


def test_token_ids_are_shared_by_blocks_too():
    row = parsed({"prompt": list(range(200))}, COMPLETIONS)
    assert (len(row.shape.components), row.length_tokens) == (3, 200)
    assert parsed({"prompt": [-1] * 64}, COMPLETIONS).shape.components


# -- discovery ---------------------------------------------------------------------------------


def test_a_prefix_is_a_shape_from_its_first_line_on_if_enough_lines_have_it():
    bodies = [chat("often" if k % 2 else f"once {k}", str(k)) for k in range(2 * COUNT_MIN)]
    shapes = Counter(row.shape for row in found(bodies))
    assert sorted(shapes.values()) == [COUNT_MIN, COUNT_MIN]
    assert {len(shape.components) for shape in shapes} == {0, 1}


def test_one_line_too_few_is_no_shape():
    bodies = [chat("often", str(k)) for k in range(COUNT_MIN - 1)]
    assert {row.shape.components for row in found(bodies)} == {()}


def test_the_longest_shared_part_decides_and_the_rest_falls_to_its_parent():
    prefix = text_of(1, 2 * BLOCK_CHARS)
    deep = [prefix + text_of(2, BLOCK_CHARS) + str(k) for k in range(COUNT_MIN)]
    rare = [prefix + text_of(100 + k, BLOCK_CHARS) for k in range(5)]
    rows = found([{"prompt": text} for text in deep + rare], COMPLETIONS)
    assert [len(row.shape.components) for row in rows] == [3] * COUNT_MIN + [2] * 5


def test_lines_that_left_the_window_still_count():
    bodies = [chat("often" if k % 10 == 0 else f"once {k}", str(k)) for k in range(10 * COUNT_MIN)]
    rows = found(bodies, window_lines=8)
    assert rows[-1].shape.components == ()
    assert len(rows[10 * (COUNT_MIN - 1)].shape.components) == 1


def test_a_shape_that_was_found_stays_found_when_its_count_is_forgotten():
    often = [chat("often", str(k)) for k in range(COUNT_MIN)]
    others = [chat(f"once {k}", "x") for k in range(500)]
    rows = found(often + others + [chat("often", "again")], window_lines=40, entries_max=64)
    assert rows[-1].shape == rows[0].shape
    assert len(rows[0].shape.components) == 1


def test_a_declared_shape_is_taken_as_it_is():
    bodies = [chat(f"all different {k}", str(k)) for k in range(3)]
    rows = found(bodies, extra={"shape": ["qa", "v3"]})
    assert {len(row.shape.components) for row in rows} == {2}
    assert all(row.declared for row in rows)
    (bad,) = found(bodies[:1], extra={"shape": []})
    assert (type(bad), bad.code) == (BadLine, "bad_shape")


def test_a_shape_shows_itself_by_an_example():
    rows = found([chat("Name the\nteam " * 40, str(k)) for k in range(COUNT_MIN)])
    assert rows[5].shape.label.startswith("q-0: Name the team Name the team")
    assert len(rows[5].shape.label.encode()) <= LABEL_BYTES_MAX


def test_rows_come_in_order_and_bad_ones_pass():
    lines = stream_of([chat("s", "1")]).getvalue() + b"not json\n"
    rows = list(Discovery(window_lines=1).assign(read_requests(io.BytesIO(lines * 1))))
    assert [type(row) for row in rows] == [Request, BadLine]


def test_the_window_is_bounded_in_lines_and_in_bytes():
    finder = Discovery(window_lines=10, window_bytes=2_000)
    given = read_requests(stream_of([chat("s" * 500, str(k)) for k in range(50)]))
    for row in finder.assign(given):
        assert finder.read_upto - row.line_number <= 4
    finder = Discovery(window_lines=10)
    given = read_requests(stream_of([chat("s", str(k)) for k in range(50)]))
    assert max(finder.read_upto - row.line_number for row in finder.assign(given)) == 10


@given(st.lists(st.integers(0, 60), max_size=2_000), st.integers(8, 40))
@settings(max_examples=60, deadline=None)
def test_the_table_is_bounded_and_never_counts_too_high(nodes, entries_max):
    table, truth = FrequentNodes(entries_max), Counter()
    for node in nodes:
        table.add([node])
        truth[node] += 1
        assert len(table) <= entries_max + 1
        assert all(table[each] <= count for each, count in truth.items())


def test_a_node_that_comes_often_survives_a_flood_of_others():
    table = FrequentNodes(1_000)
    for k in range(100_000):
        table.add([k + 10])
        if k % 50 == 0:
            table.add([1])
    assert table[1] > 1_000


@pytest.mark.e2e
def test_the_broker_shows_what_was_found_by_example(tmp_path):
    lines = stream_of([chat("Name the team.", str(k)) for k in range(COUNT_MIN)]).getvalue()
    (tmp_path / "in.jsonl").write_bytes(lines)
    with brokering() as broker, serving(FAST, broker.address):
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", broker=broker.address)
        with operating(broker.address) as client:
            (row,) = client.request("shapes", 10)
        shown = zfabric("shapes", "--broker", broker.address, cwd=tmp_path).stdout
    assert (row["accepted_items"], row["example"]) == (COUNT_MIN, "q-0: Name the team.")
    assert "q-0: Name the team." in shown


# -- real prompts ------------------------------------------------------------------------------


def few_shot(row):
    return f"{row[0]}\n\nQ: {row[1]}\nA:"


FORMS = {
    "chat": (CHAT, lambda row: chat(*row)),
    "few-shot in the user message": (
        CHAT, lambda row: {"messages": [{"role": "user", "content": few_shot(row)}]}
    ),
    "plain": (COMPLETIONS, lambda row: {"prompt": few_shot(row)}),
}  # fmt: skip


def real_rows(order):
    tasks = []
    for path in sorted((ROOT / BBH).glob("*.json")):
        task = json.loads(path.read_text(encoding="utf-8"))
        tasks.append([(task["prefix"], question) for question in task["questions"]])
    if order == "task":
        return list(itertools.chain.from_iterable(tasks))
    return [row for group in itertools.zip_longest(*tasks) for row in group if row]


@pytest.mark.skipif(not (ROOT / BBH).is_dir(), reason="the shared data is not here")
@pytest.mark.parametrize("order", ["task", "interleaved"])
@pytest.mark.parametrize("form", FORMS)
def test_real_prompts_keep_what_they_share(form, order):
    url, body = FORMS[form]
    rows = real_rows(order)
    out = found([body(row) for row in rows], url)
    shared = kept = 0
    for (prefix, _), row in zip(rows, out, strict=True):
        shared += estimate_tokens(prefix)
        kept += min(estimate_tokens(prefix), row.shape.prefix_tokens)
    shapes = Counter(row.shape for row in out)
    assert kept >= 0.95 * shared
    assert len(shapes) <= 2 * 18
    assert sum(count for count in shapes.values() if count < COUNT_MIN) <= 0.01 * len(rows)


@pytest.mark.skipif(not (ROOT / BBH).is_dir(), reason="the shared data is not here")
def test_a_time_stamp_in_front_leaves_nothing_to_share_and_makes_no_shapes():
    rows = enumerate(real_rows("interleaved"))
    out = found([{"prompt": f"[{k}] {few_shot(row)}"} for k, row in rows], COMPLETIONS)
    assert {row.shape.components for row in out} == {()}
