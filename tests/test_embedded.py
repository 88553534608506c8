"""`zfabric run-batch --engine`: one command does a whole job, and goes on after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from tests.fakeserver import error, faking
from tests.running import (
    ids_of,
    lines_in,
    read_rows,
    request,
    start_zfabric,
    until,
    write_batch,
    zfabric,
)
from zfabric.cli import owned
from zfabric.cli.children import Children
from zfabric.cli.fabric import contract_of
from zfabric.config import WorkerConfig
from zfabric.errors import ConfigError
from zfabric.shapes import Contract
from zfabric_workers import engine_factory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]
SLOW = ("--opt", "batch_us=200000", "--max-batch", "4")


def descendants(pid):
    """Every process that `pid` has started, directly or not."""
    parent_of = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent_of[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parent_of.items() if parent in found} - found:
        found |= more
    return found - {pid}


def engines(pid):
    """The processes of engines among them."""
    return [
        child
        for child in descendants(pid)
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def kill_everything(process):
    """SIGKILL for the command and all that it has started, at once."""
    pids = descendants(process.pid)
    assert len(pids) >= 3, "broker, worker and engine"
    for pid in {process.pid, *pids}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def prompts(count):
    system = "Answer the question with one word. " * 20
    return [request(f"q-{k}", f"question {k} " * (1 + k % 9), system=system) for k in range(count)]


def run(cwd, *flags):
    return zfabric("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *flags, cwd=cwd)


def test_one_command_does_the_whole_job_and_leaves_nothing_behind(tmp_path):
    write_batch(tmp_path / "in.jsonl", [*prompts(100), "not json"])
    done = run(tmp_path, "--engine", "sim", "--workers", "2", "--json")
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["done"], summary["bad"], summary["complete"]) == (100, 1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.errors.jsonl", "out.jsonl", "out.jsonl.zfabric.json"
    ]  # fmt: skip
    again = run(tmp_path, "--engine", "sim", "--resume", "--json")
    assert json.loads(again.stdout)["submitted"] == 0


def test_after_a_kill_of_everything_resume_does_the_rest(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(60))
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "sim", *SLOW)
    process = start_zfabric(*words, cwd=tmp_path)
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 8)
    kill_everything(process)
    before = lines_in(tmp_path / "out.jsonl")
    assert before < 60
    done = run(tmp_path, "--engine", "sim", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    # what the broker had taken is its own still: nothing was sent twice
    assert (summary["adopted"], summary["submitted"]) == (60 - summary["resumed"], 0)
    assert ids_of(tmp_path / "out.jsonl") == sorted(f"q-{k}" for k in range(60))


def test_a_kill_of_the_command_alone_ends_its_children_and_resume_waits_for_them(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(60))
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "sim", *SLOW)
    process = start_zfabric(*words, cwd=tmp_path)
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 4)
    children = descendants(process.pid)
    process.kill()
    process.communicate()
    done = run(tmp_path, "--engine", "sim", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == 60
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children))


def test_llama_cpp_does_a_whole_job_and_goes_on_after_a_kill(tmp_path):
    pytest.importorskip("xllamacpp", reason="the extra zfabric[llamacpp] is not installed")
    from zfabric_workers.tinygguf import write_tiny_gguf

    write_tiny_gguf(tmp_path / "tiny.gguf")
    rows = prompts(200)
    for row in rows:
        row["body"]["max_tokens"] = 2
    write_batch(tmp_path / "in.jsonl", rows)
    flags = ("--engine", "llamacpp", "--model-path", "tiny.gguf", "--workers", "2")
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *flags, "--max-batch", "4")
    process = start_zfabric(*words, cwd=tmp_path)
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 8)
    kill_everything(process)
    done = run(tmp_path, *flags, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert ids_of(tmp_path / "out.jsonl") == sorted(f"q-{k}" for k in range(200))
    for row in read_rows(tmp_path / "out.jsonl"):
        ChatCompletion.model_validate(row["response"]["body"])


def test_an_engine_that_cannot_load_ends_the_run_with_its_reason(tmp_path):
    pytest.importorskip("xllamacpp", reason="the extra zfabric[llamacpp] is not installed")
    write_batch(tmp_path / "in.jsonl", prompts(3))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, or so it says")
    done = run(tmp_path, "--engine", "llamacpp", "--model-path", "bad.gguf")
    assert done.returncode == 2
    assert "no worker is left; llamacpp-0 ended with code 2" in done.stderr
    assert "bad.gguf is damaged" in done.stderr
    assert not read_rows(tmp_path / "out.jsonl")


def test_a_model_that_its_workers_do_not_serve_ends_the_run_with_code_4(tmp_path):
    rows = [request("a"), request("b", model="other")]
    write_batch(tmp_path / "in.jsonl", rows)
    done = run(tmp_path, "--engine", "sim")
    assert done.returncode == 4
    assert "no worker serves" in done.stderr
    assert ids_of(tmp_path / "out.jsonl") == ["a"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--engine", "nothing"), "unknown engine 'nothing'"),
        (("--engine", "llamacpp"), "--model-path"),
        (("--engine", "sim", "--url", "http://x"), "unknown engine option 'url'"),
        (("--engine", "sim", "--broker", "tcp://127.0.0.1:1"), "leave out --broker"),
        (("--engine", "sim", "--opt", "speed=fast"), "speed must be a number"),
    ],
)
def test_flags_that_cannot_be_used_end_it_before_anything_starts(flags, text, tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(1))
    done = run(tmp_path, *flags)
    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


UNUSABLE = {
    "no key file": ((), "cannot read the API key"),
    "empty key": ((b" \n",), "holds no API key"),
    "binary key": ((b"\xff\xfe\x00",), "cannot read the API key"),
    "two keys": ((b"key-one\nkey-two\n",), "no header can carry"),
    "no host": ((b"key", "http://"), "names no server"),
    "open bracket": ((b"key", "http://[::1"), "is no address"),
    "port": ((b"key", "http://127.0.0.1:99999"), "is no address"),
    "user and key": ((b"key", "http://ann:pa55@127.0.0.1"), "only one can be sent"),
}


@pytest.mark.parametrize(("given", "text"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_no_server_could_be_asked_with_is_refused_without_the_secret(given, text, tmp_path):
    pytest.importorskip("aiohttp", reason="the extra zfabric[openai] is not installed")
    key = tmp_path / "key"
    if given:
        key.write_bytes(given[0])
    url = given[1] if len(given) > 1 else "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match=text) as caught:
        engine_factory("openai", {"url": url, "api_key_file": str(key)})
    assert not any(secret in str(caught.value) for secret in ("pa55", "key-one", "key-two"))


@pytest.mark.parametrize("command", ["run-batch", "worker"])
def test_an_empty_key_file_ends_it_at_once(command, tmp_path):
    pytest.importorskip("aiohttp", reason="the extra zfabric[openai] is not installed")
    write_batch(tmp_path / "in.jsonl", prompts(1))
    (tmp_path / "key").touch()
    flags = ("--engine", "openai", "--opt", "api_key_file=key", "--model", "m")
    if command == "worker":
        contract = ("--max-batch", "8", "--max-tokens", "8192", "--max-input", "1024")
        done = zfabric("worker", *flags, *contract, cwd=tmp_path)
    else:
        done = run(tmp_path, *flags)
    assert done.returncode == 2
    assert "holds no API key" in done.stderr
    assert not (tmp_path / "out.jsonl.fabric").exists()


def test_packages_that_are_missing_are_named_at_once(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torch, .*pip install 'zfabric\[embed\]'"):
        engine_factory("embed", {})
    with pytest.raises(ConfigError, match=r"pip install 'zfabric\[openai\]'"):
        engine_factory("openai", {})


def test_an_output_with_rows_is_not_touched(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(1))
    (tmp_path / "out.jsonl").write_text("{}\n")
    (tmp_path / "out.jsonl.fabric").mkdir()
    done = run(tmp_path, "--engine", "sim")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert (tmp_path / "out.jsonl.fabric").exists()


def test_the_contract_is_what_was_given_else_what_suits_the_engine():
    assert contract_of("sim", WorkerConfig()) == Contract(32, 65_536, 8_192)
    assert contract_of("llamacpp", WorkerConfig()) == Contract(32, 65_536, 8_192, ragged=True)
    # a batch is over with its last item: it has to be several times what is in flight
    assert contract_of("openai", WorkerConfig()) == Contract(256, 262_144, 8_192, ragged=True)
    assert contract_of("openai", WorkerConfig(max_batch=7)).batch_items_max == 7
    with pytest.raises(ConfigError, match="tokens"):
        contract_of("sim", WorkerConfig(max_input=100_000))


ODD_FILES = {
    "no input": (("-i", "none"), "cannot read input none"),
    "a directory as input": (("-i", "folder"), "not a regular file: save it to one"),
    "a pipe as input": (("-i", "pipe"), "not a regular file: save it to one"),
    "an empty input": (("-i", "empty"), "no line of empty can be run"),
    "no directory for the output": (("-o", "no/out.jsonl"), "there is no directory no: make it"),
    "a file as directory": (("-o", "empty/out.jsonl"), "there is no directory empty"),
    "a directory as output": (("-o", "folder"), "folder is not a regular file"),
    "a device as output": (("-o", "/dev/null"), "/dev/null is not a regular file"),
    "no name": (("-o", ""), "say where the rows go"),
    "too long a name": (("-o", "x" * 250), "File name too long"),
    "no directory for errors": (("--errors", "no/errors"), "there is no directory no"),
    "one file for both": (("--errors", "out.jsonl"), "must be different files"),
    "the input as output": (("-o", "in.jsonl"), "must be different files"),
    "no tokenizer": (("--tokenizer", "none"), "no tokenizer 'none'"),
}


@pytest.mark.parametrize(("flags", "text"), ODD_FILES.values(), ids=ODD_FILES)
def test_files_that_cannot_be_used_end_it_before_a_broker_is_started(flags, text, tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    done = run(tmp_path, "--engine", "sim", *flags)
    assert done.returncode == 2
    assert text in done.stderr
    assert "a broker of its own" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_error_of_a_worker_is_told_without_the_rest_of_its_log(tmp_path):
    children = Children(tmp_path)
    log = tmp_path / "w.log"
    log.write_text("loading\nzfabric: error: there is no CUDA device here\n")
    assert children.log_tail("w") == "there is no CUDA device here"
    log.write_text("zfabric: error: no\nTraceback: and more")
    assert children.log_tail("w").endswith("and more")
    log.write_text("")
    assert children.log_tail("w") == "it said nothing"


@pytest.mark.parametrize("flag", ["--overwrite", "--resume", None])
def test_a_directory_that_zfabric_did_not_make_is_left_alone(flag, tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(1))
    (tmp_path / "out.jsonl.fabric").mkdir()
    (tmp_path / "out.jsonl.fabric" / "thesis").write_text("years of work")
    done = run(tmp_path, "--engine", "sim", *([flag] if flag else []))
    assert done.returncode == 2
    assert "zfabric did not make it" in done.stderr and "move it away" in done.stderr
    assert [path.name for path in (tmp_path / "out.jsonl.fabric").iterdir()] == ["thesis"]


def test_a_link_in_its_place_is_not_followed(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "out.jsonl.fabric").symlink_to("mine")
    done = run(tmp_path, "--engine", "sim")
    assert done.returncode == 2
    assert (tmp_path / "mine").is_dir() and not list((tmp_path / "mine").iterdir())


def test_a_second_run_on_the_same_output_is_refused_and_the_first_goes_on(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(40))
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "sim", *SLOW)
    process = start_zfabric(*words, cwd=tmp_path)
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 4)
    (engine,) = engines(process.pid)
    # or it might be done before the second has begun
    os.kill(engine, signal.SIGSTOP)
    for flag in ("--overwrite", "--resume"):
        second = run(tmp_path, "--engine", "sim", flag)
        assert second.returncode == 2
        assert f"in use by another run (pid {process.pid})" in second.stderr
    os.kill(engine, signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert ids_of(tmp_path / "out.jsonl") == sorted(f"q-{k}" for k in range(40))
    assert not (tmp_path / "out.jsonl.fabric").exists()


def test_two_that_begin_together_have_the_directory_one_after_the_other(tmp_path):
    """Whoever is second is refused before it touches anything, and can have it afterwards."""
    with owned.owning(tmp_path / "d"):
        (tmp_path / "d" / "data").mkdir()
        with pytest.raises(ConfigError, match=str(os.getpid())), owned.owning(tmp_path / "d"):
            pass
        assert (tmp_path / "d" / "data").is_dir()
    with owned.owning(tmp_path / "d"):
        owned.empty(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_fifo_is_kept_in_memory_and_resume_runs_the_rest_again(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(40))
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "sim", *SLOW)
    process = start_zfabric(*words, "--policy", "fifo", cwd=tmp_path)
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 4)
    kill_everything(process)
    assert not (tmp_path / "out.jsonl.fabric" / "data").exists()
    done = run(tmp_path, "--engine", "sim", "--policy", "fifo", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert "in memory only" in done.stderr
    summary = json.loads(done.stdout)
    assert (summary["adopted"], summary["submitted"]) == (0, 40 - summary["resumed"])
    assert ids_of(tmp_path / "out.jsonl") == sorted(f"q-{k}" for k in range(40))


def test_a_server_that_refuses_the_key_is_told_of_after_a_few_seconds(tmp_path):
    pytest.importorskip("aiohttp", reason="the extra zfabric[openai] is not installed")
    write_batch(tmp_path / "in.jsonl", prompts(4))
    (tmp_path / "key").write_text("sk-wrong-key")
    with faking(lambda url, body: error(401, "sk-wrong-key is no key")) as server:
        flags = ("--engine", "openai", "--url", server.url, "--opt", "api_key_file=key")
        done = run(tmp_path, *flags, "--stall-timeout", "13")
    assert done.returncode == 4
    assert "the server refuses the API key: HTTP 401: [secret] is no key" in done.stderr
    assert "--resume and another --url or key" in done.stderr
    assert "sk-wrong-key" not in done.stderr
    logs = b"".join(each.read_bytes() for each in tmp_path.glob("out.jsonl.fabric/*.log"))
    assert b"HTTP 401" in logs and b"sk-wrong-key" not in logs


def test_a_stop_says_how_to_go_on_with_all_that_was_told(tmp_path):
    write_batch(tmp_path / "in.jsonl", prompts(60))
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "sim", *SLOW)
    process = start_zfabric(*words, cwd=tmp_path)
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 4)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    go_on = said.rpartition("To go on: zfabric ")[2].splitlines()[0].split()
    assert go_on[-6:] == ["--engine", "sim", "--max-batch", "4", "--opt", "batch_us=200000"]
    done = zfabric(*go_on, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == 60


def test_a_dry_run_shows_shapes_by_example_and_runs_nothing(tmp_path):
    write_batch(tmp_path / "in.jsonl", [*prompts(100), request("odd", "x", system="alone")])
    done = zfabric("run-batch", "-i", "in.jsonl", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "q-0: Answer the question with one word." in done.stdout
    assert "1 item in shapes of under 32 items" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    done = zfabric("run-batch", "-i", "in.jsonl", "--dry-run", "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert [shape["items"] for shape in plan["shapes"]] == [100, 1]
    assert plan["policies"]["lanes"]["waste_ratio"] < plan["policies"]["fifo"]["waste_ratio"]
    reals = {each["real_tokens"] for each in plan["policies"].values()}
    assert reals == {plan["tokens"]}
