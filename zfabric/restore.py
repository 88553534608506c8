"""Restoring: what was found on disk becomes the state of a new fabric.

Every live item is ready again, in its lane; what was completed stays so; each producer continues at
its number with the results that it has not acknowledged. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zfabric.fabric import Fabric
from zfabric.files import FileBacking, FileSegment
from zfabric.groups import DeadRecord
from zfabric.peers import Producer
from zfabric.recovery import FoundProducer, FoundSegment, Recovered
from zfabric.segments import LIVE
from zfabric.shapes import Shape
from zfabric.store import ENTRY_BITS, LaneQueue


@dataclass(slots=True)
class _Lane:
    """The segments of one lane of one shape."""

    shape: Shape
    lane: int
    segments: list[FoundSegment] = field(default_factory=list)


def restore(fabric: Fabric, backing: FileBacking, found: Recovered, now: float) -> None:
    """Enter `found` into an empty fabric whose store rests on `backing`."""
    for producer in found.producers.values():
        _restore_producer(fabric, producer, now)
    lanes: dict[tuple[str, int, int], _Lane] = {}
    for segment in found.segments:
        if LIVE not in segment.states:
            _retire(fabric, backing, segment)
            continue
        header = segment.header
        shape = Shape(header.model, header.components, header.tokens)
        key = (header.model, shape.signature, header.lane)
        lanes.setdefault(key, _Lane(shape, header.lane)).segments.append(segment)
    for lane in lanes.values():
        _restore_lane(fabric, backing, lane, now)
    known = backing.catalog
    fabric.flow.accept(known.ended_items + known.dead_items, known.ended_tokens + known.dead_tokens)
    fabric.flow.complete(known.ended_items, known.ended_tokens)
    fabric.flow.bury(known.dead_items, known.dead_tokens)
    for record in known.dead.values():
        dead = DeadRecord.of(record, backing.wall_offset_s)
        fabric.dead[dead.id] = dead
        fabric.dead_bytes += len(dead.payload)
    fabric.restored(known.next_producer, known.next_dead, known.retries)


def _restore_producer(fabric: Fabric, found: FoundProducer, now: float) -> None:
    while len(fabric.producers) <= found.index:
        fabric.producers.append(None)
    producer = Producer(found.index, found.name, now, last_seen_s=now)
    producer.upto, producer.above = found.upto, found.above
    producer.outbox.acked = producer.outbox.sent = found.acked_seq
    for result in found.results:
        producer.outbox.add(result)
        fabric.outbox_bytes += len(result.payload)
    producer.outstanding = len(found.results)
    fabric.producers[found.index] = producer
    fabric.producer_index[found.name] = found.index


def _count_over(fabric: Fabric, segment: FoundSegment) -> None:
    """Items of a segment that were over before the restart: accepted once, completed once."""
    over = [
        length
        for length, state, number in zip(
            segment.lengths, segment.states, segment.numbers, strict=True
        )
        if state != LIVE and number
    ]
    fabric.flow.accept(len(over), sum(over))
    fabric.flow.complete(len(over), sum(over))


def _retire(fabric: Fabric, backing: FileBacking, segment: FoundSegment) -> None:
    queue = LaneQueue(Shape(segment.header.model), 0, 0, segment.header.lane, mixed=False)
    _count_over(fabric, segment)
    backing.owe_retirement(_file_segment(0, queue, backing, segment))


def _file_segment(
    slot: int, queue: LaneQueue, backing: FileBacking, found: FoundSegment
) -> FileSegment:
    segment = FileSegment(slot, queue, backing, found.file)
    segment.lengths = found.lengths
    segment.states = found.states
    segment.tokens = sum(found.lengths)
    backing.segment_bytes += found.file.flushed - found.header.data_offset
    return segment


def _restore_lane(fabric: Fabric, backing: FileBacking, lane: _Lane, now: float) -> None:
    group = fabric.group_for(lane.shape)
    queue = fabric.queue(group, lane.lane)
    for found in lane.segments:

        def make(slot: int, found: FoundSegment = found) -> FileSegment:
            return _file_segment(slot, queue, backing, found)

        slot = fabric.store.adopt(queue, make, found.live_bytes)
        _count_over(fabric, found)
        for place, attempts in found.attempts.items():
            fabric.store.attempts[slot << ENTRY_BITS | place] = attempts
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
