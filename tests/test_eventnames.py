"""Names of events: every one that the code uses is in the table, and nothing else is."""

from __future__ import annotations

import ast
from pathlib import Path

from zfabric.eventnames import EVENTS, INFO, OTHER, WARNING, WORKER_EVENTS, level_of
from zfabric.protocol import CHARGING_KINDS

PACKAGE = Path(__file__).parents[1] / "zfabric"
# Passed as a variable: these are the values that it may have.
VARIABLE = {
    *CHARGING_KINDS, "access_refused", "model_paused", "model_resumed", "peer_error",
    "storage_available", "storage_full",
}  # fmt: skip


def names_used() -> set[str]:
    used = set(VARIABLE)
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "event" and isinstance(node.args[0], ast.Constant):
                used.add(str(node.args[0].value))
    return used


def test_table_has_every_event_and_no_other() -> None:
    assert names_used() == set(EVENTS)


def test_table_of_workers_has_every_event_of_theirs_and_no_other() -> None:
    used = {OTHER}
    for path in (PACKAGE / "worker.py", PACKAGE / "cli" / "worker.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if called in ("say", "_say") and texts:
                    used.add(str(texts[0]))
    assert used == set(WORKER_EVENTS)
    assert not set(WORKER_EVENTS) & set(EVENTS)


def test_levels_are_two_and_what_is_unknown_is_a_warning() -> None:
    assert {known.level for known in (*EVENTS.values(), *WORKER_EVENTS.values())} == {INFO, WARNING}
    assert all(known.meaning for known in EVENTS.values())
    assert level_of("something_new") == WARNING
    assert level_of("worker_joined") == INFO
