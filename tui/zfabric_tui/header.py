"""The header: how old the picture is, and in a word whether all is well. Pure."""

from __future__ import annotations

import time

from zfabric_tui.hearing import Hearing
from zfabric_tui.model import Snapshot, alarms
from zfabric_tui.replay import ReplayFeed
from zfabric_tui.text import BAD, GOOD, WARN, Line, Span, duration


def header(
    snapshot: Snapshot | None,
    address: str,
    hearing: Hearing,
    *,
    held: bool,
    replay: ReplayFeed | None,
) -> Line:
    """The line at the top; every state of it has a word of its own."""
    if replay is not None:
        return _of_replay(snapshot, replay, lost=hearing.lost)
    age_s = hearing.age_s
    if age_s is None or hearing.lost:
        heard = "nothing heard yet" if age_s is None else f"last heard {duration(age_s)} ago"
        retry_s = hearing.retry_s
        trying = "" if retry_s is None else f", trying again in {retry_s:.0f} s"
        return (Span("DISCONNECTED", BAD), Span(f" {address}: {heard}{trying}"))
    state = (Span("! LATE: no word from the broker", WARN),) if hearing.late else _state(snapshot)
    held_word = " HELD" if held else ""
    age = f" {age_s:.1f} s old{held_word} "
    return (Span(address), Span(age, WARN if held else ""), *state)


def _state(snapshot: Snapshot | None) -> Line:
    if snapshot is None:
        return ()
    found = alarms(snapshot)
    if not found:
        return (Span("HEALTHY", GOOD),)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (Span(f"! {found[0].text}{more}", found[0].level),)


def _of_replay(snapshot: Snapshot | None, replay: ReplayFeed, *, lost: bool) -> Line:
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(replay.position_s))
    state = "END" if replay.at_end else f"x{replay.speed:g}" if replay.playing else "STOPPED"
    age_s = replay.age_s
    if lost:
        known = "" if age_s is None else f", last {duration(age_s)} before"
        return (Span(f"REPLAY {now} {state} "), Span(f"GAP: nothing recorded{known}", BAD))
    return (Span(f"REPLAY {now} {state} "), *_state(snapshot))
