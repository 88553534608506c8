"""Help: what the words mean and what the keys do."""

from __future__ import annotations

from zfabric_tui.pages.page import Page
from zfabric_tui.text import DIM, HEAD, Line, line

KEYS = """\
1 to 6    overview, lanes, shapes, cards, flow, events
w         where the padding comes from, and what to do about it
?         this page; escape goes back
up down   choose a row, or scroll; page up, page down, home, end go further
enter     of a shape: its lanes
space     hold the picture, and go on; in a replay: stop, and play
ctrl+p    every command, by name
q         end; the fabric goes on

lanes     arrows move the cursor; c: what a colour says; o: order by id, target
          [ ] the shape before, the next; escape: shapes
orders    p: pause or resume a model; d: drain the broker; r: requeue what is
          dead; f: forget a worker that is gone. Each asks first.
          With --readonly, in a replay and without a broker there are none.
replay    , . one snapshot back, on; < > a minute; e E next, last event;
          - + slower, faster; g: go to a time
"""
WORDS = """\
waste     padding's part of all tokens that the cards ran, since the start
fill      items in a batch, of those that would have fitted (or tokens)
cost      (padded tokens + 2,000 a batch) / real tokens: what waste hides
pressure  lanes in use, of those that a shape may use
flow      accepted = completed + dead + set aside + ready + pending + residual;
          residual is 0, or the books do not balance
held      batches on a card, of its window; beat: since it was last heard
hits      of its prefix cache, and who says so: measured, simulated or n/a
ideal     what a cache without limit would have hit
done      of a job: every end; failed: failed, cancelled, refused or dead
!         a warning; *: the current shape, which all cards of a model drain"""


def page() -> Page:
    """The keys, then the words."""
    lines: list[Line] = [line("keys", HEAD), *map(line, KEYS.splitlines())]
    lines += [line("words", HEAD), *map(line, WORDS.splitlines())]
    lines += [line("docs/dashboard.md has all of it, with pictures", DIM)]
    return Page(lines)
