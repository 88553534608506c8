"""The rules of the code that no linter checks: sizes, docstrings, purity, links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zfabric", "tui/zfabric_tui", "workers/zfabric_workers")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PURE = ("lanes", "packing", "draining", "affinity", "sweep", "pending", "ledger", "shapes")
IMPURE_IMPORTS = {"zmq", "os", "time", "random", "secrets", "datetime", "logging", "socket"}
# (test file, reason): tests that may sleep. Empty, and best kept so: clocks are given, and an
# end-to-end test waits on an Event or polls against a monotonic deadline.
SLEEPERS: dict[str, str] = {}

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether a handler of every error does nothing with it."""
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    silent = all(
        isinstance(node, ast.Pass | ast.Continue)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in handler.body
    )
    return silent and re.search(r"\b(Base)?Exception\b", caught) is not None


def sleeps(module: ast.Module) -> Iterator[int]:
    """Lines that call time.sleep, under whatever name it was imported."""
    times, plain = set(), set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            times |= {alias.asname or "time" for alias in node.names if alias.name == "time"}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            plain |= {alias.asname or "sleep" for alias in node.names if alias.name == "sleep"}
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in plain or called in {f"{time}.sleep" for time in times}:
            yield node.lineno


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings, spelled as GitHub spells them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+\s+(.+?)\s*#*$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    found = re.findall(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)", text)
    return found + re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, flags=re.M)


def test_the_packages_are_found() -> None:
    assert any(path.name == "errors.py" for path in SOURCES)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_source_is_sized_and_documented(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES_MAX, f"{lines} lines; split it"
    module = tree(path)
    assert ast.get_docstring(module), "open with a docstring: what it decides, its units"
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert not long, f"functions over {FUNCTION_LINES_MAX} lines: {long}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_guards_raise_and_errors_are_not_swallowed(path: Path) -> None:
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: -O removes an assert; raise"
        if isinstance(node, ast.ExceptHandler):
            assert not swallows(node), f"line {node.lineno}: every error is swallowed"


@pytest.mark.parametrize("module", PURE)
def test_policy_is_pure(module: str) -> None:
    path = ROOT / "zfabric" / f"{module}.py"
    if not path.exists():
        pytest.fail(f"{path.name} is named here and is not there")
    assert not IMPURE_IMPORTS & set(imported(tree(path)))


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_tests_do_not_sleep(path: Path) -> None:
    lines = list(sleeps(tree(path)))
    assert not lines or name(path) in SLEEPERS, f"sleeps at lines {lines}: give it a clock"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_resolve(path: Path) -> None:
    for link in links(path):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        target, _, anchor = link.partition("#")
        where = (path.parent / target).resolve() if target else path
        assert where.exists(), f"{link}: no such file"
        assert where.is_relative_to(ROOT), f"{link}: outside the repository"
        if anchor and where.suffix == ".md":
            assert anchor in headings(where), f"{link}: no such heading"


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    records = {path.name for path in folder.glob("[0-9]*.md")}
    assert records
    assert records <= set(links(folder / "README.md")), "list each record in README.md"


SAMPLE = """
import time as clock
from time import sleep as nap
clock.sleep(1)
nap(2)
try:
    pass
except Exception:
    pass
"""


def test_the_rules_catch_what_they_name() -> None:
    module = ast.parse(SAMPLE)
    assert list(sleeps(module)) == [4, 5]
    assert [swallows(n) for n in ast.walk(module) if isinstance(n, ast.ExceptHandler)] == [True]
    assert set(imported(module)) == {"time"}
