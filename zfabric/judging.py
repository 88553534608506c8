"""Judging: from what every file says to what is so. Changes nothing on disk.

A place without a whole entry was torn by a crash if its window was not on the device, and lost
otherwise: its producer is told. An item with a result is over, whatever its state word says.
Numbers are accepted as far as they have no hole; a hole among numbers that were safe is a loss.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from zfabric.catalog import Catalog
from zfabric.entries import Damage, aligned
from zfabric.entryfiles import SegmentFile
from zfabric.errors import StorageError
from zfabric.outbox import Stored, error_payload
from zfabric.pins import Hole
from zfabric.protocol import BROKER_NUMBERS_FROM, NUMBER_MAX, Status
from zfabric.scanning import Scanned
from zfabric.segment import (
    DEAD_WORD,
    LIVE_WORD,
    QUARANTINED_WORD,
    RESULTS,
    TOMBSTONE_WORD,
    VOID_WORD,
    Header,
)
from zfabric.segments import LIVE, TOMBSTONE

_WORD_OF_STATUS: dict[int, int] = {Status.DEAD: DEAD_WORD, Status.QUARANTINED: QUARANTINED_WORD}
# Numbers of one hole that their producer is told of one by one.
HOLE_NUMBERS_MAX = 65_536


class Lost(NamedTuple):
    """An accepted item that cannot be read any more. `file` is None where only its number is known.

    Its producer is owed a result that says so; after that its state word may be written.
    """

    owner: int
    number: int
    gap: int
    length: int
    reason: str
    file: SegmentFile | None
    place: int


@dataclass(slots=True)
class FoundSegment:
    """A segment of items as it was found. Columns are by place."""

    file: SegmentFile
    header: Header
    lengths: array[int]
    states: bytearray
    attempts: dict[int, int]
    target: int
    live_bytes: int
    owners: array[int]
    # (items, tokens) of what is over, by state word
    counts: dict[int, tuple[int, int]]
    # runs of entries whose bytes were given back, and the tokens that their items had
    holes: list[Hole]
    hole_tokens: int


@dataclass(slots=True)
class FoundProducer:
    """A producer as the catalog, the results and the segments tell of it."""

    index: int
    name: str
    upto: int
    above: set[int] = field(default_factory=set)
    acked_seq: int = 0
    results: list[Stored] = field(default_factory=list)


@dataclass(slots=True)
class Recovered:
    """Everything that a new process takes over."""

    producers: dict[int, FoundProducer] = field(default_factory=dict)
    segments: list[FoundSegment] = field(default_factory=list)
    # what producers are to be told of, see Lost
    quarantined: list[Lost] = field(default_factory=list)
    seconds: float = 0.0
    bytes_read: int = 0
    entries: int = 0
    completed_by_result: int = 0
    torn_bytes: int = 0
    # header copies and state words that were written anew
    healed: int = 0
    damaged: list[Damage] = field(default_factory=list)
    quarantined_files: list[str] = field(default_factory=list)


class Judge:
    """Judges files in this order: all results, all segments, then the numbers."""

    def __init__(
        self,
        catalog: Catalog,
        safe: int,
        found: Recovered,
        file_of: Callable[[Scanned], SegmentFile],
    ) -> None:
        self._catalog = catalog
        # every commit window up to this one was on the device
        self._safe = safe
        self._found = found
        self._file_of = file_of
        self._answered: dict[tuple[int, int], Stored | None] = {}
        # of each producer: its numbers, each times two, plus one where it was safe
        self._numbers: dict[int, array[int]] = {}
        self._gaps: dict[tuple[int, int], int] = {}
        # (producer's name, its number) of what lives: the lowest number under which it does
        self._living: dict[tuple[str, int], int] = {}
        # numbers of requeued items whose place is live; those of them that a crash may have torn
        self._retrying: set[int] = set()
        self._doubtful: list[tuple[FoundSegment, Scanned, int, tuple[str, int]]] = []
        for index, floor in catalog.producers.items():
            found.producers[index] = FoundProducer(index, floor.name, floor.upto)

    # -- places -------------------------------------------------------------------------------

    def _places(self, file: Scanned) -> dict[int, Damage | None]:
        """Places that are lost; what was torn is made void, or cut off where it is the end."""
        lost: dict[int, Damage | None] = {}
        if not file.damages:
            return lost
        self._keep_end(file)
        inner = [d for d in file.damages if d.offset < file.end]
        readable = {d.entry.place: d for d in inner if d.entry is not None}
        unread = [d for d in inner if d.entry is None]
        counted: set[Damage] = set()
        for place in range(file.places):
            damage, word = readable.get(place), file.words[place]
            if word == VOID_WORD or (damage is None and file.numbers[place]):
                continue
            if file.is_hole(place):
                continue
            entry = damage.entry if damage is not None else None
            window = entry.window if entry is not None else _window_after(file, place)
            bytes_of = unread if damage is None else [damage]
            if word == LIVE_WORD and window > self._safe:
                if file.header.kind == RESULTS:
                    file.cut(place)
                    break
                file.blank(place)
                file.words[place] = file.marks[place] = VOID_WORD
                self._keep(file, bytes_of)
                self._found.torn_bytes += sum(d.end - d.offset for d in bytes_of)
                continue
            if entry is not None:
                file.put(entry)
            if word == LIVE_WORD:
                lost[place] = damage
                self._keep(file, bytes_of)
            if word != QUARANTINED_WORD:
                self._found.damaged += (d for d in bytes_of if d not in counted)
                counted.update(bytes_of)
        if file.size > file.end:
            file.evidence.append((file.end, file.size))
            self._found.torn_bytes += file.size - file.end
        return lost

    def _keep_end(self, file: Scanned) -> None:
        """Entries at the end that were safe are damaged, not torn: they keep their places."""
        for damage in file.damages:
            entry = damage.entry
            if damage.offset < file.end:
                continue
            if entry is None or entry.window > self._safe or entry.place < file.places:
                return
            file.put(entry)
            file.end = entry.end

    @staticmethod
    def _keep(file: Scanned, damages: list[Damage]) -> None:
        for damage in damages:
            span = (damage.offset, min(damage.end, file.size))
            if span not in file.evidence:
                file.evidence.append(span)

    def _is_known(self, owner: int, window: int) -> bool:
        """Whether an entry is of a producer that exists or did. Raises StorageError if it must."""
        if owner < self._catalog.next_producer:
            return True
        if window <= self._safe:
            raise StorageError(
                f"catalog.log has lost the record of producer {owner}, of which there are items or "
                "results; restore it from a copy"
            )
        return False

    # -- results ------------------------------------------------------------------------------

    def results(self, owner: int, files: list[Scanned]) -> list[tuple[Scanned, int, int]]:
        """All results of one producer; returns (file, first sequence number, how many are freed).

        Files that nothing is left of are marked to be removed.
        """
        if owner not in self._found.producers:
            for file in files:
                file.set_aside = not self._is_known(owner, max(file.windows, default=0))
                file.remove = not file.set_aside
            return []
        known: dict[int, Stored] = {}
        freed_seq = 0
        kept: list[tuple[Scanned, int]] = []
        torn = False
        following = self._catalog.producers[owner].seq + 1
        for file in sorted(files, key=lambda file: file.first_seq or 0):
            before = file.places
            lost = self._places(file)
            first = file.first_seq
            behind = first is not None and first > following and file.windows[0] > self._safe
            if torn or behind or first is None or not file.places:
                # What is behind a torn result was never sent; its items are alive.
                file.set_aside, torn = True, torn or behind or before > 0
                continue
            torn = file.places < before
            following = max(following, first + file.places)
            kept.append((file, first))
            for place in range(file.places):
                number = file.numbers[place]
                if file.words[place] != LIVE_WORD:
                    freed_seq = max(freed_seq, first + place)
                elif place in lost or place not in file.results:
                    known[first + place] = _unreadable(number, file.gaps[place])
                else:
                    known[first + place] = file.results[place]
                if number:
                    self._answered[owner, number] = known.get(first + place)
                    self._note(owner, number, file.gaps[place], file.windows[place])
        self._settle_results(owner, known, freed_seq, kept)
        return [self._freed(file, first, owner) for file, first in kept]

    def _settle_results(
        self, owner: int, known: dict[int, Stored], freed_seq: int, kept: list[tuple[Scanned, int]]
    ) -> None:
        """Acknowledgements are cumulative, and no sequence number is given twice."""
        producer, floor = self._found.producers[owner], self._catalog.producers[owner]
        acked = max(freed_seq, min((first for _, first in kept), default=1) - 1)
        alive = [seq for seq in known if seq > acked]
        last = max([acked, floor.seq, *alive])
        if not alive:
            acked = last
        producer.acked_seq = acked
        producer.results = [
            known.get(seq) or _unreadable(0, 0) for seq in range(acked + 1, last + 1)
        ]
        floor.seq = last

    def _freed(self, file: Scanned, first: int, owner: int) -> tuple[Scanned, int, int]:
        freed = max(0, min(file.places, self._found.producers[owner].acked_seq - first + 1))
        for place in range(freed):
            if file.words[place] == LIVE_WORD:
                file.marks[place] = TOMBSTONE_WORD
        return file, first, freed

    # -- segments -----------------------------------------------------------------------------

    def segment(self, file: Scanned) -> FoundSegment | None:
        """A segment of items; None where nothing is left of it."""
        lost = self._places(file)
        if not file.places:
            file.set_aside = True
            return None
        found = FoundSegment(
            self._file_of(file),
            file.header,
            file.lengths,
            bytearray([TOMBSTONE]) * file.places,
            {},
            file.target,
            0,
            file.owners,
            {},
            file.holes,
            sum(tokens for _, _, tokens in file.ended),
        )
        for word, items, tokens in file.ended:
            before = found.counts.get(word, (0, 0))
            found.counts[word] = (before[0] + items, before[1] + tokens)
        for place in range(file.places):
            if file.is_hole(place):
                continue
            number = file.numbers[place]
            word = file.words[place]
            if word == LIVE_WORD:
                word = self._end_of(found, file, place, number, lost)
                if word == LIVE_WORD:
                    found.states[place] = LIVE
                    found.live_bytes += _live_bytes(found, file, place)
                    if file.attempts[place]:
                        found.attempts[place] = file.attempts[place]
            if word == VOID_WORD:
                file.blank(place)
            elif number:
                self._note(file.owners[place], number, file.gaps[place], file.windows[place])
            if word != LIVE_WORD:
                items, tokens = found.counts.get(word, (0, 0))
                found.counts[word] = (items + 1, tokens + file.lengths[place])
        return found

    def _end_of(
        self,
        found: FoundSegment,
        file: Scanned,
        place: int,
        number: int,
        lost: dict[int, Damage | None],
    ) -> int:
        """The word that a live place should have. What a producer must be told first is noted."""
        owner = file.owners[place]
        producer = self._found.producers.get(owner)
        first = self._number_told(number)
        if number > NUMBER_MAX:
            self._retrying.add(number)
        if not number:
            word = QUARANTINED_WORD
        elif producer is None:
            # Forgotten; or it never was: its record was written with the items, and torn.
            known = self._is_known(owner, file.windows[place])
            word = TOMBSTONE_WORD if known else VOID_WORD
        elif (owner, number) in self._answered:
            result = self._answered[owner, number]
            status = result.status if result is not None else Status.OK
            word = _WORD_OF_STATUS.get(status, TOMBSTONE_WORD)
            self._found.completed_by_result += 1
            if result is not None and word == DEAD_WORD:
                self._rebury(found, file, place, producer.name, first, result)
        elif place in lost:
            damage = lost[place]
            reason = damage.reason if damage is not None else "it cannot be read"
            length, gap = file.lengths[place], file.gaps[place]
            owed = Lost(owner, number, gap, length, reason, found.file, place)
            self._found.quarantined.append(owed)
            return QUARANTINED_WORD
        else:
            key = producer.name, first
            self._living[key] = min(number, self._living.get(key, number))
            if number > NUMBER_MAX and file.windows[place] > self._safe:
                self._doubtful.append((found, file, place, key))
            return LIVE_WORD
        file.marks[place] = word
        return word

    def _number_told(self, number: int) -> int:
        """The number that a producer gave to an item, whichever number it has now.

        A requeued item that is stored, or was, was requeued, whatever became of what says so.
        """
        if number <= NUMBER_MAX:
            return number
        record = self._catalog.dead.pop(number - BROKER_NUMBERS_FROM, None)
        if record is not None:
            self._catalog.retries[number] = record["number"]
        return self._catalog.retries.get(number, number)

    def _rebury(
        self, found: FoundSegment, file: Scanned, place: int, name: str, first: int, result: Stored
    ) -> None:
        """An item was given up, and a crash tore the record but not the result: make it again."""
        records = self._catalog.dead.values()
        if any((r["producer"], r["number"]) == (name, first) for r in records):
            return
        header = file.header
        entry, payload = found.file.entry(place)
        self._catalog.take(
            {
                "t": "dead",
                "id": self._catalog.next_dead,
                "producer": name,
                "number": first,
                "model": header.model,
                "components": list(header.components),
                "tokens": list(header.tokens),
                "length": entry.length,
                "payload": payload,
                "reason": _message_of(result.payload),
                "attempts": file.attempts[place],
                "at": entry.when_us / 1e6,
            }
        )

    # -- numbers ------------------------------------------------------------------------------

    def _note(self, owner: int, number: int, gap: int, window: int) -> None:
        """A number was seen."""
        if number > NUMBER_MAX:
            self._number_told(number)
            return
        column = self._numbers.get(owner)
        if column is None:
            column = self._numbers[owner] = array("Q")
        column.append(2 * number + (window <= self._safe))
        if gap != 1:
            # Results do not know their gap; their entries, which come later, do.
            self._gaps[owner, number] = gap or self._gaps.get((owner, number), 0)
        elif self._gaps:
            self._gaps.pop((owner, number), None)

    def settle(self) -> None:
        """How far each producer's numbers are accepted, and which dead records are true."""
        for producer in self._found.producers.values():
            self._settle_numbers(producer)
        catalog = self._catalog
        self._settle_doubtful()
        catalog.retries = {n: of for n, of in catalog.retries.items() if n in self._retrying}
        for number, record in list(catalog.dead.items()):
            # Its result was torn, and so it is alive again.
            torn = record.get("window", 0) > self._safe
            if torn and (record["producer"], record["number"]) in self._living:
                del catalog.dead[number]
        owners = [max(s.owners, default=0) for s in self._found.segments]
        catalog.next_producer = max([catalog.next_producer, *(owner + 1 for owner in owners)])

    def _settle_doubtful(self) -> None:
        """Requeued items of which nothing was promised, and whose end before that a crash tore."""
        for found, file, place, key in self._doubtful:
            number = file.numbers[place]
            unknown = number not in self._catalog.retries and not self._catalog.salvaged
            if unknown or self._living[key] < number:
                found.states[place], file.marks[place] = TOMBSTONE, VOID_WORD
                found.live_bytes -= _live_bytes(found, file, place)
                found.attempts.pop(place, None)
                found.counts[VOID_WORD] = found.counts.get(VOID_WORD, (0, 0))[0] + 1, 0
                file.blank(place)

    def _settle_numbers(self, producer: FoundProducer) -> None:
        floor = self._catalog.producers[producer.index]
        upto, above = floor.upto, set(floor.above)
        missing = False
        for value in sorted(self._numbers.get(producer.index, ())):
            number, safe = value >> 1, value & 1
            if number <= upto:
                continue
            gap = self._gaps.get((producer.index, number), 1)
            before = upto if safe and not gap else number - (gap or 1)
            if number in floor.above and not gap:
                # Behind a hole once; only its result is left, which does not say what was before.
                before = number - 1
            if before > upto and (not safe or number in floor.above):
                above.add(number)
                continue
            if before > upto and not self._catalog.salvaged:
                # Something was accepted before it, and no file has it.
                missing = self._miss(producer, upto, before, above) or missing
            upto = number
        producer.upto, producer.above = upto, {n for n in above if n > upto}
        if not missing and not any(
            lost.owner == producer.index for lost in self._found.quarantined
        ):
            floor.upto = upto
        floor.above = {n for n in (*floor.above, *producer.above) if n > floor.upto}

    def _miss(self, producer: FoundProducer, upto: int, before: int, above: set[int]) -> bool:
        """Numbers behind `upto` and up to `before` are lost; whether there are any."""
        first = upto + 1 if before - upto <= HOLE_NUMBERS_MAX else before
        numbers = [n for n in range(first, before + 1) if n not in above]
        for number in numbers:
            gap = number - upto if number == first else 1
            lost = Lost(producer.index, number, gap, 0, "no file has it any more", None, 0)
            self._found.quarantined.append(lost)
        return bool(numbers)


def _live_bytes(found: FoundSegment, file: Scanned, place: int) -> int:
    """What the payload of a live place takes in its file; damage behind an entry counts as its."""
    if file.damages or file.holes:
        return found.file.payload_bytes(place, place + 1)
    return aligned(file.sizes[place])


def _window_after(file: Scanned, place: int) -> int:
    """The window of the next whole entry, which is not earlier than that of `place`."""
    return next(filter(None, file.windows[place:]), 0)


def _unreadable(number: int, gap: int) -> Stored:
    """What takes the place of a result that is lost; its number is 0 where it cannot be read."""
    payload = error_payload("quarantined", "the result was damaged on disk")
    return Stored(number, Status.QUARANTINED, payload, None, gap)


def _message_of(payload: bytes) -> str:
    try:
        return str(json.loads(payload)["message"])
    except (ValueError, KeyError, TypeError):
        return "given up"
