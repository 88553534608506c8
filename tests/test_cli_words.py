"""What the command line says and how it fits: unknown words, tables, terminals, nobody there."""

from __future__ import annotations

import json
import re
import socket
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import zfabric
import zfabric_workers
from tests.test_cli import commands, out_of, plain_surroundings, words_of
from zfabric.cli import build_parser, common
from zfabric.config import KEYS, load

__all__ = ["plain_surroundings"]


# -- flags and commands ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("status", "--jsn"),
            "unknown flag --jsn (did you mean --json?); see zfabric status --help",
        ),
        (("broker", "--prot=1"), "unknown flag --prot (did you mean --port?); see zfabric broker"),
        (("dead", "ls", "--xyzzy"), "unknown flag --xyzzy; see zfabric dead ls --help"),
        (("--jsn", "status"), "unknown flag --jsn; see zfabric --help"),
        (("status", "now"), "unexpected argument 'now'; see zfabric status --help"),
        (("statsu",), "argument COMMAND: no 'statsu' (did you mean status?); see zfabric --help"),
        (("producers", "cancl"), "(did you mean cancel?); see zfabric producers --help"),
        (("completion", "fish"), "no 'fish' (one of bash, zsh); see zfabric completion --help"),
        (("broker", "--packing", "x"), "(one of strict, tight, group)"),
        (("shapes", "--top", "0"), "argument --top: must be a whole number of at least 1, not '0'"),
        (("dead", "ls", "--top", "-1"), "--top"),
        (("demo", "--items", "x"), "argument --items: must be a whole number of at least 1"),
        (("dead", "drop", "x"), "argument ID: 'x' is not a whole number; see"),
        (("top", "--hz", "x"), "argument --hz: 'x' is not a number; see zfabric top --help"),
        (
            ("run-batch", "-i", "a", "-o", "b", "--stall-timeout", "-1"),
            "argument --stall-timeout: '-1' is not a value that it takes",
        ),
    ],
    ids=words_of,
)
def test_a_wrong_word_is_named_with_the_nearest_and_the_command(words, said, capsys):
    code, out, err = out_of(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_every_command_is_on_one_line_with_its_summary(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = out_of(capsys, "--help")
    names = {words[0] for words, _ in commands()}
    assert {line.split()[0] for line in out.splitlines() if line.startswith("    ")} == names
    assert "    completion  completion script" in out


@pytest.mark.parametrize("group", ["dead", "producers", "config"])
def test_a_group_of_commands_helps_like_a_command(group, capsys):
    code, out, _ = out_of(capsys, group, "--help")
    assert code == 0
    assert f"example:\n  zfabric {group} " in out and "--traceback" in out


@pytest.mark.parametrize(("words", "parser"), commands(build_parser()), ids=words_of)
def test_every_argument_says_what_it_is(words, parser):
    for action in parser._actions:
        assert action.help, f"{action.dest} of {' '.join(words)}"
        assert action.metavar not in ("STR", "INT", "FLOAT")


def test_engines_that_there_are_are_the_engines_that_the_help_names():
    from zfabric_workers import ENGINES

    assert KEYS["worker.engine"].help.endswith(f": {', '.join(sorted(ENGINES))}")


def test_commands_that_a_text_names_are_there():
    known = {words[:2] for words, _ in commands()}
    groups = {words[0] for words in known if len(words) > 1}
    root = Path(zfabric.__file__).parent
    named = {
        tuple(words)
        for path in [*root.rglob("*.py"), *Path(zfabric_workers.__file__).parent.glob("*.py")]
        for words in re.findall(r"`zfabric ([a-z-]+) ([a-z][a-z-]*)", path.read_text())
        if words[0] in groups
    }
    assert named and named <= known


# -- settings -------------------------------------------------------------------------------------


def test_shown_settings_are_a_file_of_settings(tmp_path, capsys):
    for words in (("config", "show"), ("config", "show", "--origin")):
        code, out, _ = out_of(capsys, *words)
        assert code == 0
        assert "# broker.data is not set" in out
        assert tomllib.loads(out)["broker"]["linger_ms"] == 200
        (tmp_path / "zfabric.toml").write_text(out)
        assert load(environ={}).broker == load(environ={}, directory=tmp_path / "x").broker
        (tmp_path / "zfabric.toml").unlink()


def test_settings_for_programs_have_their_types(capsys):
    _, out, _ = out_of(capsys, "config", "show", "--json")
    told = {name: row["value"] for name, row in json.loads(out).items()}
    assert told.keys() == KEYS.keys()
    assert (told["broker.port"], told["broker.hz"], told["broker.memory"]) == (7410, 4.0, False)
    assert (told["broker.data"], told["broker.max_bytes"]) == (None, 4 << 30)


# -- tables ---------------------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(common, "columns", lambda: 20)
    return


def test_a_table_that_is_too_wide_does_without_its_spare_columns(narrow):
    rows = [["gpu0", "running", 1_234, "x"]]
    headers = ("card", "state", "done", "contract")
    shown = common.table(headers, rows, spare=("contract", "state"))
    assert shown.splitlines() == ["card  state     done", "gpu0  running  1,234"]


def test_a_table_that_is_still_too_wide_has_its_names_cut_in_the_middle(narrow):
    rows = [["nightly/evaluation/one", 7], ["nightly/evaluation/two", 8]]
    assert common.table(("job", "done"), rows).splitlines() == [
        "job             done",
        "nightly…on/one     7",
        "nightly…on/two     8",
    ]


def test_where_there_is_no_terminal_nothing_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    shown = common.table(("job", "done"), [["nightly/evaluation/one", 7]], spare=("done",))
    assert shown.splitlines()[1] == "nightly/evaluation/one     7"
    assert common.pairs([("held", "one two three four")]) == "held  one two three four"


def test_pairs_wrap_to_the_terminal(narrow):
    assert common.pairs([("a", "x"), ("held", "one two three four")]).splitlines() == [
        "a     x",
        "held  one two three",
        "      four",
    ]


def test_sizes_and_names_in_few_characters():
    assert [common.size(n) for n in (0, 999, 4 << 30)] == ["0 B", "999 B", "4.29 GB"]
    assert common.middle("abcdefgh", 8) == "abcdefgh"
    assert common.middle("abcdefgh", 5) == "ab…gh"


# -- nobody there ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("status",), ("workers",), ("top", "--once"), ("drain",)])
def test_where_nothing_listens_nothing_is_waited_for(words, capsys):
    began = time.monotonic()
    code, out, err = out_of(capsys, *words, "--broker", "tcp://127.0.0.1:9", "--timeout", "60")
    assert (code, out) == (3, "")
    assert "no broker answered at tcp://127.0.0.1:9: Connection refused; start one" in err
    assert time.monotonic() - began < 30


def test_what_accepts_and_says_nothing_is_waited_for(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        code, _, err = out_of(capsys, "status", "--broker", where, "--timeout", "0.3")
    assert code == 3 and "within 0.3 s" in err


def test_a_dashboard_without_a_terminal_names_what_needs_none(capsys):
    code, out, err = out_of(capsys, "top")
    assert (code, out) == (2, "")
    assert "terminal" in err and "zfabric top --once" in err and err.count("\n") == 1
