"""Batch files: every line is one request or one bad line; output survives a crash at any byte."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfabric.batchfile import (
    BadLine,
    BatchOutput,
    DigestSet,
    Discovery,
    Request,
    check_paths,
    count_lines,
    errors_path_for,
    estimate_tokens,
    job_name,
    read_requests,
)
from zfabric.batchfile import rows as rows_module
from zfabric.batchfile.job import holder_of, sidecar_path
from zfabric.errors import ConfigError, StorageError
from zfabric.shapes import Shape

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
}


def line(
    custom_id: Any = "a", body: Any = BODY, url: Any = "/v1/chat/completions", **more: Any
) -> bytes:
    row = {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read(data: bytes, **options: Any) -> list[Request | BadLine]:
    return list(read_requests(io.BytesIO(data), **options))


def one(data: bytes, **options: Any) -> Request:
    (row,) = read(data, **options)
    assert isinstance(row, Request), row
    return row


def bad(data: bytes, **options: Any) -> BadLine:
    (row,) = read(data, **options)
    assert isinstance(row, BadLine), row
    return row


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": c} for c in contents]} | more


# --- reading


def test_chat_request_has_its_leading_messages_as_shape() -> None:
    request = one(line())
    leading = b'{"content":"S","role":"system"}'
    assert request.payload == line()
    assert request.shape == Shape.of("m", leading, tokens=[5])
    assert (request.line_number, request.custom_id, request.model) == (1, "a", "m")
    assert (request.method, request.url) == ("POST", "/v1/chat/completions")
    assert request.length_tokens == 10


def test_order_of_keys_and_spaces_do_not_change_the_shape() -> None:
    other = line().replace(
        b'{"role": "system", "content": "S"}', b'{"content":"S","role":"system"}'
    )
    assert other != line()
    assert one(other).shape == one(line()).shape


def test_last_message_is_not_in_the_shape_and_order_is() -> None:
    assert one(line(body=chat("x", "y"))).shape == one(line(body=chat("x", "z"))).shape
    assert one(line(body=chat("x"))).shape == Shape("m")
    swapped = one(line(body=chat("y", "x", "q"))).shape
    assert swapped.signature != one(line(body=chat("x", "y", "q"))).shape.signature


def test_tools_are_one_component_in_front() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request, plain = one(line(body=chat("x", "y", tools=tools))), one(line(body=chat("x", "y")))
    assert request.shape.components[1:] == plain.shape.components
    assert request.shape.tokens[1:] == plain.shape.tokens
    assert request.length_tokens == plain.length_tokens + (request.shape.tokens[0] or 0)
    assert one(line(body=chat("x", "y", tools=[]))).shape == plain.shape


@pytest.mark.parametrize("tools", [[], [{"type": "function"}]])
def test_at_most_64_components_the_first_ones(tools: list[Any]) -> None:
    long = one(line(body=chat(*map(str, range(100)), tools=tools))).shape
    longer = one(line(body=chat(*map(str, range(200)), tools=tools))).shape
    assert len(long.components) == len(long.tokens) == 64
    assert long == longer


def test_content_parts_and_tool_calls_count() -> None:
    parts = [
        {"type": "text", "text": "abcdefgh"},
        {"type": "image_url", "image_url": {"url": "x" * 9999}},
    ]
    assert one(line(body=chat(parts))).length_tokens == 4 + 2 + 85
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert one(line(body={"model": "m", "messages": [call]})).length_tokens == 4 + 3


@pytest.mark.parametrize(
    ("url", "field", "value", "tokens"),
    [
        ("/v1/completions", "prompt", "abcde", 2),
        ("/v1/completions", "prompt", ["abcde", "a"], 3),
        ("/v1/completions", "prompt", [1, 2, 3], 3),
        ("/v1/embeddings", "input", [[1, 2], [3]], 3),
        ("/v1/embeddings", "input", "é" * 4, 2),
        ("/v1/completions", "prompt", "", 0),
    ],
)
def test_plain_prompts_have_the_model_as_shape(
    url: str, field: str, value: Any, tokens: int
) -> None:
    request = one(line(url=url, body={"model": "m", field: value}))
    assert (request.shape, request.length_tokens) == (Shape("m"), tokens)


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"\xff\xfe", "bad_utf8", "UTF-8"),
        (b"{", "bad_json", "one complete object"),
        (b'{"a": NaN}', "bad_json", "NaN"),
        (b"[" * 100_000, "bad_json", ""),
        (b"9" * 5000, "bad_json", ""),
        (b"[1]", "not_object", "list"),
        (line(None), "bad_custom_id", "custom_id"),
        (line(7), "bad_custom_id", "custom_id"),
        (line(""), "bad_custom_id", "custom_id"),
        (b'{"custom_id": "\\ud800"}', "bad_custom_id", "surrogate"),
        (line(method="GET"), "bad_method", "POST"),
        (line(url="/v1/images"), "bad_url", "/v1/embeddings"),
        (line(url=["x"]), "bad_url", "/v1/embeddings"),
        (line(body="x"), "bad_body", "object"),
        (line(body={"messages": []}), "missing_model", "--model"),
        (line(body=BODY | {"model": 5}), "bad_model", "--model"),
        (line(body=BODY | {"model": "m" * 256}), "bad_model", "255"),
        (line(body={"model": "m"}), "bad_messages", "list"),
        (line(body={"model": "m", "messages": []}), "bad_messages", "at least one"),
        (line(body={"model": "m", "messages": ["x"]}), "bad_messages", "role"),
        (line(body=chat(5)), "bad_messages", "content"),
        (line(body=chat(["x"])), "bad_messages", "part"),
        (line(url="/v1/completions"), "bad_prompt", "no prompt"),
        (
            line(url="/v1/completions", body={"model": "m", "prompt": [1, "x"]}),
            "bad_prompt",
            "text",
        ),
        (line(url="/v1/completions", body={"model": "m", "prompt": []}), "bad_prompt", "text"),
        (line(url="/v1/embeddings"), "bad_input", "no input"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
def test_bad_line_has_a_stable_code_and_names_the_fix(data: bytes, code: str, word: str) -> None:
    row = bad(data)
    assert (row.line_number, row.code) == (1, code)
    assert word in row.reason
    assert len(row.reason) < 300


def test_bad_line_keeps_its_custom_id_and_the_rest_goes_on() -> None:
    rows = read(line("a", body=3) + b"\n" + line("b") + b"\n{\n" + line("c"))
    assert [type(row).__name__ for row in rows] == ["BadLine", "Request", "BadLine", "Request"]
    assert [row.custom_id for row in rows] == ["a", "b", None, "c"]
    assert [row.line_number for row in rows] == [1, 2, 3, 4]


def test_duplicate_custom_id_is_bad_and_the_first_one_counts() -> None:
    rows = read(b"\n".join([line("a"), line("b"), line("a")]))
    assert [getattr(row, "code", None) for row in rows] == [None, None, "duplicate_custom_id"]


def test_bom_crlf_blank_lines_and_no_end_of_line() -> None:
    rows = read(b"\xef\xbb\xbf" + line("a") + b"\r\n\r\n  \n" + line("ü") + b"\r\n" + line("c"))
    assert [row.line_number for row in rows] == [1, 4, 5]
    assert [row.payload for row in rows if isinstance(row, Request)] == [
        line("a"), line("ü"), line("c"),
    ]  # fmt: skip


def test_bom_is_tolerated_on_the_first_line_only() -> None:
    assert read(line("a") + b"\n\xef\xbb\xbf" + line("b"))[1].custom_id is None


def test_model_override_makes_new_bytes_and_nothing_else_does() -> None:
    body = BODY | {"seed": 1, "x": "héllo", "y": 0.1}
    request = one(line(body=body), model="other")
    assert json.loads(request.payload) == json.loads(line(body=body | {"model": "other"}))
    assert "héllo".encode() in request.payload
    assert request.shape.model == "other"
    assert one(line(), model="m").payload == line()
    assert one(line(body=chat("q") | {"model": 5}), model="m").model == "m"
    with pytest.raises(ConfigError):
        read(b"", model="")


def test_override_of_what_json_cannot_say_again() -> None:
    data = line().replace(b'"model": "m"', b'"model": "m", "x": 1e999')
    assert one(data).payload == data
    assert bad(data, model="other").code == "bad_json"
    half = line(body=BODY | {"x": "@"}).replace(b"@", b"\\ud800")
    assert json.loads(one(half, model="other").payload)["body"]["x"] == "\ud800"


class Endless(io.RawIOBase):
    """`size` bytes of one line, then a line that is sound; remembers the largest read."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.tail = b"\n" + line("after") + b"\n"
        self.largest = 0

    def readline(self, limit: int | None = -1, /) -> bytes:
        limit = -1 if limit is None else limit
        self.largest = max(self.largest, limit)
        if self.left > limit:
            self.left -= limit
            return b"x" * limit
        if self.left:
            chunk, self.left = b"x" * self.left + b"\n", 0
            self.tail = self.tail[1:]
            return chunk
        chunk, self.tail = self.tail, b""
        return chunk


def test_huge_line_is_skipped_without_being_held() -> None:
    stream = Endless(1 << 30)
    rows = list(read_requests(stream, line_bytes_max=1 << 20))  # type: ignore[arg-type]
    assert isinstance(rows[0], BadLine)
    assert (rows[0].code, rows[0].line_number, rows[0].custom_id) == ("line_too_long", 1, None)
    assert str((1 << 30) + 1) in rows[0].reason
    assert (rows[1].line_number, rows[1].custom_id) == (2, "after")
    assert stream.largest <= (1 << 20) + 2


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""])
def test_line_of_exactly_the_limit(ending: bytes) -> None:
    size = len(line())
    assert one(line() + ending, line_bytes_max=size).payload == line()
    assert bad(line() + ending, line_bytes_max=size - 1).code == "line_too_long"


def test_returns_inside_a_line_do_not_split_it() -> None:
    rows = read(b"x" * 10 + b"\r\ry\n" + line("b"), line_bytes_max=10)
    assert [row.line_number for row in rows] == [1, 2]


@settings(deadline=None)
@given(st.binary(max_size=400), st.sampled_from([None, "m"]), st.integers(1, 50))
def test_any_bytes_give_one_row_a_line(data: bytes, model: str | None, limit: int) -> None:
    expected = [
        number
        for number, text in enumerate(data.split(b"\n"), 1)
        if (text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text).strip()
    ]
    rows = read(data, model=model)
    assert [row.line_number for row in rows] == expected
    short = {row.line_number for row in read(data, model=model, line_bytes_max=limit)}
    assert short >= set(expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.text(max_size=3) | JSON, "content": JSON})
ROW = st.fixed_dictionaries(
    {"custom_id": st.sampled_from(["a", "b", "c"]), "method": st.just("POST")},
    optional={
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "x"]),
        "body": JSON | st.fixed_dictionaries(
            {"model": st.just("m") | JSON},
            optional={"messages": st.lists(MESSAGE | JSON, max_size=4) | JSON, "tools": JSON,
                      "prompt": JSON, "input": JSON},
        ),
    },
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(ROW | JSON, max_size=5), st.booleans(), st.sampled_from([None, "n"]))
def test_any_json_gives_one_row_a_line(
    values: list[Any], ascii_only: bool, model: str | None
) -> None:
    lines = [
        json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        for value in values
    ]
    rows = read(b"\n".join(lines), model=model)
    assert [row.line_number for row in rows] == list(range(1, len(values) + 1))
    accepted = [row for row in rows if isinstance(row, Request)]
    assert len({row.custom_id for row in accepted}) == len(accepted)
    for row in accepted:
        assert row.length_tokens >= 0
        assert json.loads(row.payload)["body"]["model"] == row.model
        assert model is not None or row.payload == lines[row.line_number - 1]


def test_estimate_is_bytes_over_four_rounded_up() -> None:
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "日本")] == [0, 1, 1, 2, 2]


@given(st.binary(max_size=300))
def test_count_lines_agrees_with_the_reader(data: bytes) -> None:
    assert count_lines(io.BytesIO(data)) == (len(io.BytesIO(data).readlines()), len(data))


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=8)))
def test_digest_set_is_a_set(texts: list[str]) -> None:
    digests, oracle = DigestSet(), set()
    for text in texts:
        assert (text in digests) == (text in oracle)
        assert digests.add(text) == (text not in oracle)
        oracle.add(text)
    assert len(digests) == len(oracle)


def test_digest_set_doubles_on_disk_and_keeps_nothing_in_memory(tmp_path: Path) -> None:
    digests = DigestSet(tmp_path)
    assert all(digests.add(str(number)) for number in range(20_000))
    assert not any(digests.add(str(number)) for number in range(20_000))
    assert all(str(number) in digests for number in range(20_000))
    assert not any(str(number) in digests for number in range(20_000, 40_000))
    assert len(digests) == 20_000
    assert os.fstat(digests._table._descriptor).st_size / len(digests) < 21
    assert len(digests._used) * digests._used.itemsize < 1_000
    assert not list(tmp_path.iterdir())


def test_digest_set_gives_its_file_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        digests = DigestSet()
        for number in range(2_000):
            digests.add(str(number))
    del digests
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_digest_set_on_a_full_disk_says_where(tmp_path: Path, monkeypatch: Any) -> None:
    digests = DigestSet(tmp_path)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=f"{tmp_path}: No space left"):
        digests.add("a")
    monkeypatch.undo()
    assert "a" not in digests and digests.add("a")


# --- writing


class Files:
    """An input of three requests and the places of its output."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"
        self.input.write_bytes(b"".join(line(name) + b"\n" for name in "abc"))

    def open(self, **options: Any) -> BatchOutput:
        return BatchOutput.open(self.output, input_path=self.input, **options)

    def rows(self, path: Path | None = None) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (path or self.output).read_bytes().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


BAD = BadLine(3, None, "bad_json", "write JSON")


def test_rows_have_the_batch_format(files: Files) -> None:
    with files.open() as out:
        assert out.write_result(1, "a", b'{\n "text": "h\xc3\xa9"}', request_id="req_7")
        assert out.write_failure(2, "b", "dead", "three attempts")
        assert out.write_bad_line(BAD)
        assert (out.results_total, out.failures_total, out.bad_lines_total) == (1, 1, 1)
    (row,) = files.rows()
    assert row["response"] == {"status_code": 200, "request_id": "req_7", "body": {"text": "hé"}}
    assert (row["custom_id"], row["error"]) == ("a", None)
    failure, bad_line = files.rows(files.errors)
    assert failure["error"] == {"code": "dead", "message": "three attempts"}
    assert (failure["custom_id"], failure["response"], "line" in failure) == ("b", None, False)
    assert (bad_line["custom_id"], bad_line["line"]) == (None, 3)
    assert bad_line["error"] == {"code": "bad_json", "message": "line 3: write JSON"}
    ids = [row["id"], failure["id"], bad_line["id"]]
    assert len(set(ids)) == 3
    assert all(i.startswith("batch_req_") for i in ids)


def test_each_custom_id_is_written_once(files: Files) -> None:
    with files.open() as out:
        assert out.write_result(1, "a", b"{}")
        assert not out.write_result(1, "a", b"{}")
        assert not out.write_failure(1, "a", "dead", "")
        assert out.write_bad_line(BadLine(9, "a", "duplicate_custom_id", ""))
        assert not out.write_bad_line(BadLine(9, "a", "duplicate_custom_id", ""))
        assert (out.is_done("a"), out.is_done("b")) == (True, False)
    assert len(files.rows()) == 1


@pytest.mark.parametrize("body", [b"", b"nonsense", b'{"x": NaN}', b'{"x": 1e999}', b"\xff"])
def test_result_that_is_not_json_is_a_failure(files: Files, body: bytes) -> None:
    with files.open() as out:
        assert out.write_result(1, "a", body)
    assert files.rows() == []
    assert files.rows(files.errors)[0]["error"]["code"] == "bad_result"


def test_bad_duplicate_does_not_make_its_first_line_done(files: Files) -> None:
    with files.open() as out:
        out.write_bad_line(BadLine(2, "a", "duplicate_custom_id", ""))
    with files.open(resume=True) as out:
        assert not out.is_done("a")
        assert not out.write_bad_line(BadLine(2, "a", "duplicate_custom_id", ""))


def test_non_empty_output_is_refused_and_kept(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    before = files.output.read_bytes()
    with pytest.raises(ConfigError, match=r"--resume.*--overwrite"):
        files.open()
    assert files.output.read_bytes() == before
    with files.open(overwrite=True) as new:
        assert not new.is_done("a")
        assert new.job.superseded[-1] == out.job.name != new.job.name
    assert files.output.read_bytes() == b""
    with pytest.raises(ConfigError, match="exclude"):
        files.open(resume=True, overwrite=True)


def test_resume_continues_the_same_job(files: Files) -> None:
    with files.open(resume=True) as out:
        out.write_result(1, "a", b"{}")
        out.write_failure(2, "b", "dead", "")
        out.write_bad_line(BAD)
    with files.open(resume=True) as again:
        assert again.job == out.job
        assert again.job.superseded == ()
        assert [again.is_done(name) for name in "abc"] == [True, True, False]
        assert not again.write_bad_line(BAD)
        assert again.write_result(3, "c", b"{}")
        assert (again.results_total, again.failures_total, again.bad_lines_total) == (2, 1, 1)
    assert [row["custom_id"] for row in files.rows()] == ["a", "c"]


def test_torn_tail_at_every_byte(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with files.open() as out:
        for number, name in enumerate("abc", 1):
            out.write_result(number, name, '{"t": "é\\n"}'.encode())
    whole = files.output.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        files.output.write_bytes(whole[:size])
        with files.open(resume=True) as again:
            done = [again.is_done(name) for name in "abc"]
            assert done == [end <= size for end in ends]
            assert files.output.stat().st_size == max([0, *(end for end in ends if end <= size)])
            assert again.job == out.job
            for number, name in enumerate("abc", 1):
                assert (
                    again.write_result(number, name, '{"t": "é\\n"}'.encode()) != done[number - 1]
                )
        assert files.output.read_bytes() == whole


def test_tail_of_zeros_is_cut(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    whole = files.output.read_bytes()
    files.output.write_bytes(whole + bytes(50) + b"\n" + bytes(4096))
    with files.open(resume=True) as again:
        assert (again.is_done("a"), again.job) == (True, out.job)
    assert files.output.read_bytes() == whole


def test_damage_in_the_middle_is_removed_and_renews_the_job(files: Files) -> None:
    with files.open() as out:
        for number, name in enumerate("abc", 1):
            out.write_result(number, name, b"{}")
    first, second, third = files.output.read_bytes().splitlines(keepends=True)
    files.output.write_bytes(first + bytes(len(second)) + b"\n" + third)
    files.output.chmod(0o640)
    with files.open(resume=True) as again:
        assert [again.is_done(name) for name in "abc"] == [True, False, True]
        assert again.job.superseded[-1] == out.job.name
        with pytest.raises(ConfigError, match="being written"):
            files.open(resume=True)
        assert again.write_result(2, "b", b"{}")
    assert [row["custom_id"] for row in files.rows()] == ["a", "c", "b"]
    assert files.output.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in files.output.parent.iterdir()} == {
        "in.jsonl", "out.jsonl", "out.errors.jsonl", "out.jsonl.zfabric.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["# Notes\n\nMine.\n", '{"mine": 1}\n', "[1]\n", "one line", "\n\n"]
)
def test_foreign_file_is_not_touched(files: Files, text: str) -> None:
    files.output.write_text(text)
    with pytest.raises(ConfigError, match=r"not (a )?batch result"):
        files.open(resume=True)
    assert files.output.read_text() == text


def test_resume_of_an_output_without_a_sidecar(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    sidecar_path(files.output).unlink()
    with files.output.open("ab") as stream:
        stream.write(b'{"id": "ba')
    with files.open(resume=True) as again:
        assert again.is_done("a")
        assert again.job.name != out.job.name
    assert len(files.rows()) == 1


def test_removed_output_is_not_resumed_under_the_old_name(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    files.output.unlink()
    with files.open(resume=True) as again:
        assert not again.is_done("a")
        assert again.job.superseded[-1] == out.job.name


def test_retry_failed_redoes_failures_under_a_new_name(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
        out.write_failure(2, "b", "dead", "")
        out.write_bad_line(BAD)
    with files.open(retry_failed=True) as again:
        assert [again.is_done(name) for name in "abc"] == [True, False, False]
        assert (again.failures_total, again.bad_lines_total) == (0, 1)
        assert again.job.superseded[-1] == out.job.name
        assert not again.write_bad_line(BAD)
        assert [row.get("line") for row in files.rows(files.errors)] == [3]
        again.write_result(2, "b", b"{}")
    with files.open(retry_failed=True) as third:
        assert third.job == again.job
        assert third.is_done("b")


def test_crash_between_new_name_and_rewrite(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with files.open() as out:
        out.write_failure(2, "b", "dead", "")

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rows_module.RowFile, "_copy_rows", crash)
        files.open(retry_failed=True)
    assert len(files.rows(files.errors)) == 1
    with files.open(retry_failed=True) as again:
        assert not again.is_done("b")
        assert again.job.name != out.job.name


@pytest.mark.parametrize("change", ["size", "first line", "path", "order"])
def test_resume_with_another_input(files: Files, change: str) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
        out.write_bad_line(BAD)
    data = files.input.read_bytes()
    if change == "size":
        files.input.write_bytes(data + line("d"))
    elif change == "first line":
        files.input.write_bytes(data.replace(b'"a"', b'"z"', 1))
    elif change == "order":
        first, second, third = data.splitlines(keepends=True)
        files.input.write_bytes(first + third + second)
    else:
        files.input = files.input.rename(files.input.with_name("moved.jsonl"))
    with pytest.raises(ConfigError, match=r"another run.*--overwrite.*--force"):
        files.open(resume=True)
    with files.open(resume=True, force=True) as again:
        assert again.is_done("a")
        assert again.job.superseded[-1] == out.job.name
        assert again.write_bad_line(BAD)
        assert again.bad_lines_total == 1
    assert len(files.rows(files.errors)) == 1
    with files.open(resume=True) as third:
        assert third.job == again.job


def test_resume_without_the_output_judges_bad_lines_anew(files: Files) -> None:
    with files.open() as out:
        out.write_failure(1, "a", "dead", "")
        out.write_bad_line(BAD)
    files.output.unlink()
    with files.open(resume=True) as again:
        assert again.is_done("a")
        assert again.write_bad_line(BAD)
        assert (again.failures_total, again.bad_lines_total) == (1, 1)
    assert [row["custom_id"] for row in files.rows(files.errors)] == ["a", None]


def test_resume_remembers_the_errors_file(files: Files, tmp_path: Path) -> None:
    with files.open(errors=tmp_path / "e") as out:
        out.write_failure(1, "a", "dead", "")
    with files.open(resume=True) as again:
        assert again.is_done("a")
    with pytest.raises(ConfigError, match="errors file was"):
        files.open(resume=True, errors=tmp_path / "f")


def test_two_runs_on_one_output_are_refused_by_pid(files: Files, tmp_path: Path) -> None:
    with files.open():
        with pytest.raises(ConfigError, match=f"being written by pid {os.getpid()}"):
            files.open(resume=True)
        other = tmp_path / "other.jsonl"
        with pytest.raises(ConfigError, match=r"out\.errors\.jsonl is being written by another"):
            BatchOutput.open(other, input_path=files.input, errors=files.errors)
        BatchOutput.open(other, input_path=files.input).close()
    files.open(resume=True).close()


def test_run_in_another_process_is_named_by_pid(files: Files) -> None:
    code = (
        "import sys, pathlib; from zfabric.batchfile import BatchOutput as B;"
        "o = B.open(pathlib.Path(sys.argv[2]), input_path=pathlib.Path(sys.argv[1]));"
        "o.write_result(1, 'a', b'{}'); o.sync(); o.write_result(2, 'b', b'{}');"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(files.input), str(files.output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=f"pid {child.pid};"):
            files.open(resume=True)
        child.kill()
    with files.open(resume=True) as again:
        assert [again.is_done(name) for name in "ab"] == [True, False]


def test_one_file_by_two_names_and_a_link_to_itself_are_refused(
    files: Files, tmp_path: Path
) -> None:
    files.output.hardlink_to(files.input)
    with pytest.raises(ConfigError, match="different files"):
        check_paths(files.input, files.output, None)
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="leads to itself"):
        check_paths(files.input, loop, None)


def test_paths_must_differ_and_be_usable(files: Files, tmp_path: Path) -> None:
    for output, errors in (
        (files.input, None),
        (files.output, files.output),
        (files.output, files.input),
        (files.output, sidecar_path(files.output)),
    ):
        with pytest.raises(ConfigError, match="different files"):
            BatchOutput.open(output, input_path=files.input, errors=errors, overwrite=True)
    with pytest.raises(ConfigError, match="cannot read input"):
        BatchOutput.open(files.output, input_path=tmp_path / "none")
    with pytest.raises(ConfigError, match="regular file"):
        BatchOutput.open(files.output, input_path=tmp_path)
    with pytest.raises(ConfigError, match="cannot open"):
        BatchOutput.open(tmp_path / "no" / "out", input_path=files.input)
    with pytest.raises(ConfigError, match="regular file"):
        BatchOutput.open(Path("/dev/null"), input_path=files.input, errors=files.errors)
    assert files.input.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "input": {}}'])
def test_sidecar_that_cannot_be_read(files: Files, text: str) -> None:
    sidecar_path(files.output).write_text(text)
    with pytest.raises(ConfigError, match="--overwrite"):
        files.open(resume=True)
    assert holder_of(files.output) == "another process"
    files.open(overwrite=True).close()
    files.open(resume=True).close()


def test_full_disk_stops_for_good(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    out = files.open()
    out.write_result(1, "a", b"{}")
    real = os.write

    def short(descriptor: int, data: Any) -> int:
        if len(data) > 10:
            return real(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", short)
        with pytest.raises(StorageError, match=r"No space left.*--resume"):
            out.sync()
    with pytest.raises(StorageError, match=r"No space left.*--resume"):
        out.sync()
    with pytest.raises(StorageError, match="No space left"):
        out.close()
    with files.open(resume=True) as again:
        assert not again.is_done("a")
    assert files.output.read_bytes() == b""


def test_failed_sync_is_final(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    out = files.open()
    out.write_result(1, "a", b"{}")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            out.sync()
    with pytest.raises(StorageError, match="Input/output error"):
        out.sync()
    with pytest.raises(StorageError):
        out.close()


def test_sync_covers_rows_of_the_run_before(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    with files.open(resume=True) as again:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        again.sync()
        assert len(synced) == 2
        again.sync()
        assert len(synced) == 2


def test_job_name_is_bounded_and_stable(tmp_path: Path) -> None:
    name = job_name(tmp_path / "out.jsonl", "0a0b0c0d")
    assert name.startswith("batch-out.jsonl-")
    assert name.endswith("-0a0b0c0d")
    assert name == job_name(tmp_path / "x" / ".." / "out.jsonl", "0a0b0c0d")
    assert name != job_name(tmp_path / "y" / "out.jsonl", "0a0b0c0d")
    for text in ("é" * 120, "日" * 80, "a\nb\udcff"):
        long = job_name(tmp_path / text, "0a0b0c0d")
        assert len(long.encode()) <= 255
        Shape(long)


def test_errors_file_is_named_after_the_output() -> None:
    names = {
        "out.jsonl": "out.errors.jsonl",
        "a.b.jsonl": "a.b.errors.jsonl",
        "out": "out.errors",
        "res.a": "res.a.errors",
        "res.b": "res.b.errors",
        "x.json": "x.json.errors",
        ".jsonl": ".errors.jsonl",
        "out.errors.jsonl": "out.errors.errors.jsonl",
    }
    assert {name: errors_path_for(Path("d") / name).name for name in names} == names


@given(st.sets(st.text("ab.jsonler", min_size=1, max_size=12), min_size=2, max_size=40))
def test_no_two_outputs_have_the_same_errors_file(names: set[str]) -> None:
    names -= {".", ".."}
    outputs = [f"{name}{end}" for name in names for end in ("", ".jsonl", ".errors")]
    paths = {errors_path_for(Path(output)) for output in outputs}
    assert len(paths) == len(set(outputs))


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=str)
def test_errors_of_another_run_are_neither_trusted_nor_erased(
    files: Files, tmp_path: Path, options: dict[str, bool]
) -> None:
    shared = tmp_path / "shared"
    with files.open(errors=shared) as out:
        out.write_failure(1, "a", "dead", "theirs")
    rows = shared.read_bytes()
    other = Files(tmp_path)
    other.output = tmp_path / "other.jsonl"
    with pytest.raises(ConfigError, match=r"errors file of .*out\.jsonl.*--errors"):
        other.open(errors=shared, **options)
    # Without the other run's files, nobody vouches for the rows.
    files.output.unlink()
    sidecar_path(files.output).unlink()
    with pytest.raises(ConfigError, match="nothing says"):
        other.open(errors=shared, **options)
    assert shared.read_bytes() == rows
    other.open(**options).close()


def test_overwrite_erases_the_errors_of_its_own_job(files: Files) -> None:
    with files.open() as out:
        out.write_failure(1, "a", "dead", "")
    with files.open(overwrite=True) as again:
        assert not again.is_done("a")
        assert files.errors.read_bytes() == b""


@pytest.mark.parametrize("at", [1, 2])
def test_overwrite_that_crashed_can_be_done_again(
    files: Files, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
        out.write_failure(2, "b", "dead", "")
    calls = itertools.count(1)
    real = rows_module.RowFile.truncate

    def crash(self: rows_module.RowFile, size_bytes: int) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        real(self, size_bytes)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rows_module.RowFile, "truncate", crash)
        files.open(overwrite=True)
    with files.open(overwrite=True) as again:
        assert not again.is_done("a")
    assert files.errors.read_bytes() == files.output.read_bytes() == b""


# --- another model


def test_another_model_renews_the_job_and_judges_bad_lines_anew(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
        out.write_failure(2, "b", "dead", "")
        out.write_bad_line(BadLine(3, "c", "missing_model", "pass --model"))
    with files.open(resume=True, model="tiny") as again:
        assert again.model_changed
        assert again.job.superseded[-1] == out.job.name != again.job.name
        assert [again.is_done(name) for name in "abc"] == [True, True, False]
        assert (again.results_total, again.failures_total, again.bad_lines_total) == (1, 1, 0)
        assert again.write_bad_line(BadLine(3, "c", "bad_body", "still wrong"))
    with files.open(resume=True, model="tiny") as third:
        assert third.job == again.job
        assert not third.model_changed
        assert not third.write_bad_line(BadLine(3, "c", "bad_body", "still wrong"))
    with files.open(resume=True) as fourth:
        assert fourth.job.superseded[-1] == again.job.name


def test_another_model_with_failures_retried(files: Files) -> None:
    with files.open(model="one") as out:
        out.write_failure(2, "b", "dead", "")
        out.write_bad_line(BAD)
    with files.open(retry_failed=True, model="two") as again:
        assert (again.failures_total, again.bad_lines_total) == (0, 0)
        assert not again.is_done("b")
    assert files.rows(files.errors) == []


def test_sidecar_without_a_sample_of_its_input_is_continued(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    path = sidecar_path(files.output)
    row = json.loads(path.read_bytes())
    del row["input"]["sample"]
    path.write_text(json.dumps(row))
    with files.open(resume=True) as again:
        assert again.job.name == out.job.name


def test_sidecar_without_a_model_is_of_a_run_without_one(files: Files) -> None:
    with files.open() as out:
        out.write_result(1, "a", b"{}")
    path = sidecar_path(files.output)
    row = json.loads(path.read_bytes())
    del row["model"]
    path.write_text(json.dumps(row))
    with files.open(resume=True) as again:
        assert again.job == out.job


def test_failure_that_has_a_result_too_is_outdated_and_dead_ones_are_known(files: Files) -> None:
    with files.open() as out:
        for number, name in enumerate("abc", 1):
            out.write_failure(number, name, "dead" if name != "c" else "bad_result", "")
    with files.open(resume=True) as again:
        assert again.dead == {"a", "b"}
        url = "/v1/completions"
        assert again.write_retried(1, "a", b'{"choices": []}', url=url)
        for body in (b"{}", b"no JSON"):
            assert not again.write_retried(2, "b", body, url=url)
    with files.open(resume=True) as third:
        assert (third.results_total, third.failures_total) == (1, 2)
        assert (third.outdated, third.dead) == ({"a"}, {"b"})


def test_large_rows_pass_the_buffer(files: Files) -> None:
    with files.open() as out:
        for number in range(5):
            out.write_result(number, str(number), json.dumps({"t": "x" * 600_000}).encode())
    assert [len(row["response"]["body"]["t"]) for row in files.rows()] == [600_000] * 5


# --- real input


def test_real_prompts_have_18_shapes(tmp_path: Path) -> None:
    tool = SHARED / "tools" / "bbh_batch.py"
    if not tool.exists():
        pytest.skip("the shared data beside the repository is not here")
    path = tmp_path / "in.jsonl"
    with path.open("wb") as stream:
        subprocess.run([sys.executable, str(tool)], stdout=stream, check=True)
    with path.open("rb") as stream:
        lines, size = count_lines(stream)
    assert (lines, size) == (4761, path.stat().st_size)
    with path.open("rb") as stream:
        rows = list(Discovery().assign(read_requests(stream)))
    requests = [row for row in rows if isinstance(row, Request)]
    assert len(requests) == len(rows) == 4761
    assert len({(row.model, row.shape.signature) for row in requests}) == 18
    assert b"\n".join(row.payload for row in requests) + b"\n" == path.read_bytes()
    assert all(row.length_tokens > (row.shape.prefix_tokens or 0) > 0 for row in requests)


def test_reader_works_on_a_pipe() -> None:
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as sink:
            sink.write(line("a") + b"\n" + line("b") + b"\n")

    feeder = threading.Thread(target=feed)
    feeder.start()
    with os.fdopen(reading, "rb") as stream:
        assert [row.custom_id for row in read_requests(stream)] == ["a", "b"]
    feeder.join()
