"""Help: what the words mean and what the keys do."""

from __future__ import annotations

from zfabric_tui.pages.page import Page
from zfabric_tui.text import DIM, HEAD, Line, line

KEYS = """\
1 to 6     overview, lanes, shapes, cards, flow, events
w          where the padding comes from, and what to do about it
?          this page;  escape: back to where you were
up down    choose a row, move the cursor, or scroll; also page up, page down, home, end
enter      of a shape: its lanes
space      hold the picture, and go on (in a replay: stop and play)
ctrl+p     every command, by name
q          end; the fabric goes on

lanes      arrows: move the cursor   c: what the colour says   o: order by id or target
           [ ]: the shape before, the next

orders     p: pause or resume a model   d: drain the broker   r: requeue dead items
           f: forget a worker that is gone.  Each asks first; none with --readonly

replay     , .: one snapshot back, on   < >: a minute back, on   - +: slower, faster
           e E: next event, last event   g: go to a time"""
WORDS = """\
waste      padding's part of all tokens that the cards ran, since the broker started
fill       items in a batch, of those that would have fitted (or tokens, if they are nearer)
cost       (padded tokens + 2,000 a batch) / real tokens: what waste alone does not say
pressure   lanes in use, of those that a shape may use
flow       accepted = completed + dead + set aside + ready + pending + residual, and residual
           is 0, or the books do not balance
held       batches on a card, of its window;  beat: since it was last heard
hits       of its prefix cache, and who measured them: measured, simulated or n/a
ideal      what a cache without limit would have hit
done       of a job: every end; failed: those that failed, were cancelled, refused or dead
!          a warning;  >: the current shape, which all cards of a model drain"""


def page(width: int) -> Page:
    """The keys, then the words."""
    lines: list[Line] = [line("keys", HEAD)]
    for text in KEYS.splitlines():
        lines += map(line, _fitting(text, width))
    lines += [(), line("words", HEAD)]
    for text in WORDS.splitlines():
        lines += map(line, _fitting(text, width))
    lines += [(), line("docs/dashboard.md has all of it, with pictures", DIM)]
    return Page(lines)


def _fitting(text: str, width: int) -> list[str]:
    """A line, and the rest of it under its text where it is too long."""
    if len(text) <= width:
        return [text]
    at = text.rfind(" ", 12, width)
    return [text[:at], *_fitting(" " * 11 + text[at:].strip(), width)]
