"""What the README shows is run as it stands: the ten lines of Python, and the examples."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest

from tests.running import brokering, serving
from zfabric.shapes import Contract

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[1]


def python_of_the_readme() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(block)


def lines_printed(source: str) -> list[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    return printed.getvalue().splitlines()


def test_ten_lines_of_python_run_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = python_of_the_readme()
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    upper = importlib.import_module("upper_worker").Upper
    contract = Contract(32, 65_536, 8_192)
    assert len(source.splitlines()) <= 12
    with (
        brokering() as broker,
        serving(upper, broker.address, model="tiny", contract=contract),
    ):
        printed = lines_printed(source.replace("tcp://127.0.0.1:7410", broker.address))
    assert printed == [
        "b'QUESTION 0'",
        *(f"q-{k} ok b'QUESTION {k}'" for k in range(5)),
    ]


def test_commands_of_the_readme_exist() -> None:
    from zfabric.cli import build_parser

    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "operations.md").read_text()
    actions = build_parser()._subparsers
    assert actions is not None
    known = set(actions._group_actions[0].choices or ())
    named = set(re.findall(r"(?:^|`)zfabric ([a-z][a-z-]+)", text, re.MULTILINE))
    assert named
    assert named <= known
