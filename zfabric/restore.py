"""Restoring: what was found on disk becomes the state of a new fabric.

Every live item is ready again, in its lane; what was completed stays so; each producer continues at
its number with the results that it has not acknowledged. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from zfabric.deadletters import DeadRecord
from zfabric.errors import InvariantError
from zfabric.fabric import Fabric
from zfabric.files import FileBacking
from zfabric.filesegment import FileSegment
from zfabric.outbox import Stored, error_payload
from zfabric.peers import Producer
from zfabric.protocol import Status
from zfabric.queues import LaneQueue
from zfabric.recovery import FoundProducer, FoundSegment, Lost, Recovered
from zfabric.segment import DEAD_WORD, QUARANTINED_WORD, TOMBSTONE_WORD
from zfabric.segments import LIVE, TOMBSTONE
from zfabric.shapes import Shape


@dataclass(slots=True)
class _Lane:
    """The segments of one lane of one shape."""

    shape: Shape
    lane: int
    segments: list[FoundSegment] = field(default_factory=list)


def restore(fabric: Fabric, backing: FileBacking, found: Recovered, now: float) -> None:
    """Enter `found` into an empty fabric whose store rests on `backing`."""
    known = backing.catalog
    fabric.restored(known.next_producer, known.next_dead, known.retries)
    fabric.claims.restore(known.claims)
    for name in known.paused:
        fabric.model(name).paused = True
    graves = Counter(record["producer"] for record in known.dead.values())
    for producer in found.producers.values():
        _restore_producer(fabric, producer, graves[producer.name], now)
        # Files that a crash left of results that are read: nothing else may ever come for them.
        outbox_last = producer.acked_seq + len(producer.results)
        backing.free_results(producer.index, producer.acked_seq, outbox_last)
    lanes: dict[tuple[str, int, int], _Lane] = {}
    for segment in found.segments:
        _count_over(fabric, segment.counts)
        if LIVE not in segment.states:
            _retire(backing, segment)
            continue
        header = segment.header
        shape = Shape(header.model, header.components, header.tokens)
        key = (header.model, shape.signature, header.lane)
        lanes.setdefault(key, _Lane(shape, header.lane)).segments.append(segment)
    for lane in lanes.values():
        _restore_lane(fabric, backing, lane, now)
    ended = {
        TOMBSTONE_WORD: (known.ended_items, known.ended_tokens),
        DEAD_WORD: (known.dead_items, known.dead_tokens),
        QUARANTINED_WORD: (known.quarantined_items, known.quarantined_tokens),
    }
    _count_over(fabric, ended)
    for record in known.dead.values():
        dead = DeadRecord.of(record, backing.wall_offset_s)
        # Earlier releases kept those of producers that were forgotten.
        if dead.producer in fabric.producer_index:
            fabric.dead.restore(dead)
    for lost in found.quarantined:
        _tell(fabric, backing, lost, now)


def _restore_producer(fabric: Fabric, found: FoundProducer, dead: int, now: float) -> None:
    """Every result is an item that ended; how, is known of those that are not acknowledged.

    The rest count as completed, but for the `dead` ones of which there are records.
    """
    producer = Producer(found.index, found.name, now, last_seen_s=now)
    producer.upto, producer.above = found.upto, found.above
    producer.outbox.acked = producer.outbox.sent = found.acked_seq
    for result in found.results:
        producer.outbox.add((result,))
        fabric.outbox_bytes += len(result.payload)
    producer.outstanding = len(found.results)
    how = Counter(result.status for result in found.results)
    ended = producer.outbox.last - how[Status.REFUSED]
    producer.accepted_items, producer.acked_items = ended, found.acked_seq
    producer.dead_items = min(max(dead, how[Status.DEAD]), ended)
    producer.completed_items = ended - producer.dead_items
    producer.failed_items, producer.cancelled_items, producer.refused_items = (
        how[status] for status in (Status.FAILED, Status.CANCELLED, Status.REFUSED)
    )
    fabric.producers[found.index] = producer
    fabric.producer_index[found.name] = found.index


def _count_over(fabric: Fabric, counts: Mapping[int, tuple[int, int]]) -> None:
    """Items that were over before the restart: accepted once, ended once."""
    for word, end in (
        (TOMBSTONE_WORD, fabric.flow.complete),
        (DEAD_WORD, fabric.flow.bury),
        (QUARANTINED_WORD, fabric.flow.quarantine),
    ):
        items, tokens = counts.get(word, (0, 0))
        fabric.flow.accept(items, tokens)
        end(items, tokens)


def _tell(fabric: Fabric, backing: FileBacking, lost: Lost, now: float) -> None:
    """Tell a producer of an item that was lost; the item is over when that is durable."""
    producer = fabric.producers[lost.owner]
    if producer is None:
        raise InvariantError(f"item {lost.number} of producer {lost.owner}, which is gone, is lost")
    text = f"the item was damaged on disk: {lost.reason}"
    retry_of = fabric.retries.pop(lost.number, None)
    payload = error_payload("quarantined", text)
    producer.outstanding += 1
    result = Stored(lost.number, Status.QUARANTINED, payload, retry_of, lost.gap)
    fabric.post(producer, (result,))
    fabric.event(
        "item_quarantined", f"{producer.name} #{lost.number}: {text}", now, producer=producer.name
    )
    if lost.file is not None:
        backing.owe_word(lost.file, lost.place, QUARANTINED_WORD)
    else:
        _count_over(fabric, {QUARANTINED_WORD: (1, 0)})


def _retire(backing: FileBacking, segment: FoundSegment) -> None:
    header = segment.header
    queue = LaneQueue(Shape(header.model), header.signature, 0, header.lane, mixed=False)
    backing.owe_retirement(_file_segment(0, queue, backing, segment))


def _file_segment(
    slot: int, queue: LaneQueue, backing: FileBacking, found: FoundSegment
) -> FileSegment:
    segment = FileSegment(slot, queue, backing, found.file)
    segment.lengths = found.lengths
    segment.states = found.states
    segment.hole_tokens = found.hole_tokens
    segment.counts = {w: ended for w, ended in found.counts.items() if w != TOMBSTONE_WORD} or None
    segment.holes = found.holes or None
    backing.count_file(segment)
    return segment


def _restore_lane(fabric: Fabric, backing: FileBacking, lane: _Lane, now: float) -> None:
    group = fabric.group_for(lane.shape)
    queue = fabric.queue(group, lane.lane)
    for found in lane.segments:

        def make(slot: int, found: FoundSegment = found) -> FileSegment:
            segment = _file_segment(slot, queue, backing, found)
            if TOMBSTONE in segment.states:
                backing.pins.ended(segment)
            return segment

        # One that died at the limit, or a damaged count: the next failure is its last.
        last = fabric.config.attempts_max - 1
        attempts = {place: min(n, last) for place, n in found.attempts.items() if min(n, last)}
        fabric.store.adopt(queue, make, found.live_bytes, attempts)
        for place, state in enumerate(found.states):
            if state == LIVE:
                producer = fabric.producers[found.owners[place]]
                if producer is not None:
                    producer.outstanding += 1
                    producer.accepted_items += 1
                    producer.accepted_tokens += found.lengths[place]
    items, tokens = queue.ready_items, queue.ready_tokens
    fabric.flow.accept(items, tokens)
    if group.lanes is not None:
        target = max(found.target for found in lane.segments)
        group.lanes.restore(lane.lane, target, items, now)
    fabric.readied(group, lane.lane, items, tokens, now)
