"""Running an OpenAI Batch file: lines in, one output row each, whatever dies on the way.

An item's number is its line's, and the producer's name is the job's, so that a run which was killed
finds again what it had submitted: lines up to the number that the broker has taken are adopted,
not sent twice. A result is acknowledged only when its row is on disk. Where the broker no longer
holds what it took (another store, a forgotten job), the job gets a new name and everything that
is not done is sent again, read once more from the input.

Memory is bounded by what is open: numbers without a row, and bytes not yet taken by the broker.
Times are seconds, lengths tokens, sizes bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from zfabric.batchfile import BadLine, BatchOutput, Request, check_paths
from zfabric.batchoptions import Options, Summary
from zfabric.batchrows import OpenLine, drop_failures, too_long_body, usage_of
from zfabric.batchsource import Lengths, Source
from zfabric.batchwatch import Gone, Meter, Watch
from zfabric.client import Client
from zfabric.errors import ConnectError, FabricError, Lost, Refused, StorageError
from zfabric.protocol import BROKER_NUMBERS_FROM, Status
from zfabric.results import Item, Result, Results, status_name
from zfabric.session import Arrival
from zfabric.shapes import check_name

# Bytes sent or waiting that the broker has not taken yet; a full broker stops the reading.
UNTAKEN_BYTES_MAX = 64 * 1024 * 1024
CHUNK_ITEMS, CHUNK_BYTES = 1_024, 1024 * 1024
# Rows are synced, and results acknowledged, at the first of these.
SYNC_S, SYNC_ITEMS, SYNC_BYTES = 0.2, 1_000, 4 * 1024 * 1024
# Longest wait for a result before the clock is looked at.
STEP_S = 0.1
REPORT_S = 0.25
# A broker that loses the work again and again needs somebody to look at it.
RENEWALS_MAX = 100
# Dead lines of this run whose retries are recognised.
DEAD_LINES_MAX = 100_000

log = logging.getLogger("zfabric.batchrun")


class _Stopped(Exception):
    """The caller wants the run to end here."""


def run_batch(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    errors: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    force: bool = False,
    **options: Any,
) -> Summary:
    """Run the requests of `source` and append a row for each to `output`; returns what was done.

    The file options are those of `BatchOutput.open`. The others (`Options`): `broker` address,
    `key`, `model` that replaces every request's, `count` of a text's tokens (None: they are
    estimated, and corrected by the usage in results), `progress` and `notice` callbacks,
    `timeout_s` to reach the broker, `stall_timeout_s` after which a run without any result ends
    (None: never), `wait_for_workers` (False: end when nothing but models without a worker is left),
    `open_items_max`, and an Event `stop` that ends the run early and leaves it to be resumed.

    Raises ConfigError, ConnectError, StorageError (the output cannot be written), TimeoutExpired
    (see above) and Lost (the broker keeps losing the work). After any of them the run can be
    resumed.
    """
    chosen = Options(**options)
    source_path, output_path = Path(source), Path(output)
    errors_path = None if errors is None else Path(errors)
    check_paths(source_path, output_path, errors_path)
    if chosen.model is not None:
        check_name(chosen.model, "model name")
    # Before anything is overwritten: is there a broker at all?
    with Client(chosen.broker, role="operator", timeout_s=chosen.timeout_s, key=chosen.key):
        pass
    with BatchOutput.open(
        output_path,
        input_path=source_path,
        errors=errors_path,
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
        force=force,
        model=chosen.model,
    ) as opened:
        return _Run(opened, source_path, output_path, chosen).run()


class _Run:
    """One run. Everything but the arrival of results happens in the caller's thread."""

    def __init__(
        self, output: BatchOutput, source: Path, output_path: Path, options: Options
    ) -> None:
        self._output = output
        self._source = source
        self._output_path = output_path
        self._options = options
        self._summary = Summary(output.job.name, str(output_path), output.job.errors)
        self._summary.resumed = output.results_total + output.failures_total
        self._renewals = 0
        self._inbox: deque[tuple[list[Arrival], int]] = deque()
        self._arrived = threading.Event()
        # lines whose failure, written by this run, an operator may still have retried
        self._dead: dict[int, OpenLine] = {}
        # lines that a broker found too large: read again, they may be too long to be read
        self._refused: set[int] = set()
        # custom_ids that have a result although their failure has a row
        self._replaced = output.outdated
        now = time.monotonic()
        self._started_s = self._heard_s = self._unsynced_s = self._next_report_s = now
        self._meter = Meter(now)
        self._lengths = Lengths(counted=options.count is not None)
        self._rows = 0
        self._total: int | None = None
        self._total_exact = False
        self._client = self._connect()
        self._begin()
        if output.model_changed:
            to = "without --model" if options.model is None else f"with --model {options.model}"
            options.notice(f"{to} this run differs from the one before: sending what has no result")

    def _begin(self) -> None:
        """Forget everything that belongs to one name at one broker."""
        self._adopt_upto = self._client.accepted_upto
        self._watch = Watch(
            self._client,
            time.monotonic(),
            self._options.notice,
            stall_timeout_s=self._options.stall_timeout_s,
            wait_for_workers=self._options.wait_for_workers,
            why=self._options.why,
        )
        self._open: dict[int, OpenLine] = {}
        self._open_of: Counter[str] = Counter()
        self._early: dict[int, list[tuple[int, Arrival]]] = {}
        self._chunk: list[Item] = []
        self._chunk_open: list[OpenLine] = []
        self._untaken: deque[tuple[int, int]] = deque()
        self._untaken_bytes = self._chunk_bytes = 0
        self._read_upto = self._last_number = self._lines = 0
        self._taken_before = self._submitted = 0
        self._seq = self._acked_seq = self._unsynced = self._unsynced_bytes = 0

    def run(self) -> Summary:
        """Run to the end, to a stop or to an error; what has come is on disk in every case."""
        try:
            while not self._summary.complete:
                try:
                    self._attempt()
                    self._summary.complete = True
                except Gone as gone:
                    self._renew(str(gone))
        except _Stopped:
            log.info("stopped; %d items stay with the broker", len(self._open))
        finally:
            self._client.close()
        if self._replaced:
            drop_failures(self._output, self._replaced)
        self._report(time.monotonic())
        summary, output = self._summary, self._output
        summary.job = output.job.name
        summary.done, summary.failed = output.results_total, output.failures_total
        summary.bad, summary.lines = output.bad_lines_total, self._lines
        summary.length_ratio = self._lengths.ratio
        summary.seconds = time.monotonic() - self._started_s
        return summary

    def _attempt(self) -> None:
        """Everything under one name. Raises Gone when that name has come to nothing."""
        try:
            self._cancel_superseded()
            with self._client.stream(), self._source.open("rb") as stream:
                self._read(stream)
            self._tell_total()
            while self._open or self._retries_to_come():
                self._step(STEP_S)
        except StorageError:
            raise
        except (Gone, _Stopped, FabricError):
            self._take()
            self._sync()
            raise
        self._take()
        self._sync()

    def _tell_total(self) -> None:
        """How many items there will be of this name altogether, for those who watch the broker."""
        items = self._taken_before + self._submitted
        with contextlib.suppress(FabricError):
            self._client.request("expect", self._options.timeout_s, items=items)

    def _connect(self) -> Client:
        """The job's own connection. After a loss the broker may be away for a while."""
        while True:
            try:
                return Client(
                    self._options.broker,
                    name=self._output.job.name,
                    timeout_s=self._options.timeout_s,
                    key=self._options.key,
                    on_results=self._receive,
                )
            except ConnectError as error:
                if not self._renewals or self._options.stop.is_set():
                    raise
                self._options.notice(f"{error}; trying again")

    def _renew(self, reason: str) -> None:
        """Take a new name, on disk first, under which what is not done can be sent again."""
        self._renewals += 1
        if self._renewals > RENEWALS_MAX:
            raise Lost(f"the work was lost {RENEWALS_MAX} times ({reason}); look at the broker")
        self._output.sync()
        path = self._output_path.resolve()
        self._output.job = self._output.job.renewed(path)
        self._output.job.save(path)
        self._options.notice(f"{reason}: sending again what has no result")
        self._client.close()
        self._inbox.clear()
        self._client = self._connect()
        self._begin()

    def _cancel_superseded(self) -> None:
        for name in self._output.job.superseded:
            for op, args in (("producers.cancel", {}), ("producers.forget", {"force": True})):
                # It may be unknown there, or its last connection not yet be known to be dead.
                with contextlib.suppress(FabricError):
                    self._client.request(op, self._options.timeout_s, name=name, **args)
        self._output.superseded_cancelled()

    # -- reading ------------------------------------------------------------------------------

    def _read(self, stream: BinaryIO) -> None:
        source = Source(
            stream,
            model=self._options.model,
            line_bytes_max=self._client.payload_bytes_max,
            count=self._options.count,
            directory=self._output_path.resolve().parent,
        )
        for row in source.rows():
            passed, self._read_upto = self._read_upto, row.line_number
            self._lines += 1
            if isinstance(row, BadLine):
                if row.line_number not in self._refused:
                    self._unsynced += self._output.write_bad_line(row)
            else:
                self._request(row)
            self._settle_early(range(passed + 1, row.line_number + 1))
            if len(self._chunk) >= CHUNK_ITEMS or self._chunk_bytes >= CHUNK_BYTES:
                self._submit()
            if self._lines % CHUNK_ITEMS == 0:
                if not self._total_exact:
                    self._total = source.total_lines()
                # Whoever reads does not wait, however long nothing comes.
                self._heard_s = time.monotonic()
                self._step(0)
        self._submit()
        self._read_upto = BROKER_NUMBERS_FROM
        self._settle_early(list(self._early))
        self._total, self._total_exact = self._lines, True
        self._step(0)

    def _request(self, request: Request) -> None:
        line = request.line_number
        known = OpenLine(request.custom_id, request.url, request.model, request.length_tokens)
        self._taken_before += line <= self._adopt_upto
        if self._output.is_done(request.custom_id):
            if request.custom_id in self._output.dead:
                self._dead[line] = known
        elif line <= self._adopt_upto:
            self._opened(line, known)
            self._summary.adopted += 1
        else:
            length_tokens = self._lengths.of(request.length_tokens)
            item = Item(request.shape, request.payload, length_tokens, number=line)
            self._chunk.append(item)
            self._chunk_open.append(known)
            self._chunk_bytes += len(request.payload)

    def _opened(self, line: int, known: OpenLine) -> None:
        self._open[line] = known
        self._open_of[known.model] += 1

    def _submit(self) -> None:
        """Queue the chunk, once there is room for it."""
        if not self._chunk:
            return
        while not (self._has_room() and self._enqueued()):
            with self._client.blocked():
                self._step(STEP_S)
        if not self._chunk:
            return
        for item, known in zip(self._chunk, self._chunk_open, strict=True):
            self._last_number = item.number or 0
            self._opened(self._last_number, known)
        self._untaken.append((self._last_number, self._chunk_bytes))
        self._untaken_bytes += self._chunk_bytes
        self._submitted += len(self._chunk)
        self._summary.submitted += len(self._chunk)
        if self._renewals:
            self._summary.resubmitted += len(self._chunk)
        self._chunk, self._chunk_open, self._chunk_bytes = [], [], 0

    def _enqueued(self) -> bool:
        """Queue the chunk, but for what the broker of now does not take; False without room."""
        while True:
            try:
                return not self._chunk or self._client.enqueue(self._chunk, Results()) is not None
            except Refused:
                limit = self._client.payload_bytes_max
                pairs = list(zip(self._chunk, self._chunk_open, strict=True))
                fitting = [pair for pair in pairs if len(pair[0].payload) <= limit]
                self._chunk = [item for item, _ in fitting]
                self._chunk_open = [known for _, known in fitting]
                self._chunk_bytes = sum(len(item.payload) for item in self._chunk)
                for item, known in pairs:
                    if (size := len(item.payload)) > limit:
                        self._refused.add(item.number or 0)
                        text = f"{size} bytes; the broker takes {limit} at most"
                        self._unsynced += self._output.write_failure(
                            item.number or 0, known.custom_id, "too_large", text
                        )

    def _has_room(self) -> bool:
        self._forget_taken()
        if not self._open:
            return True
        return (
            len(self._open) + len(self._chunk) <= self._options.open_items_max
            and self._untaken_bytes < UNTAKEN_BYTES_MAX
        )

    def _forget_taken(self) -> None:
        upto = self._client.settled_upto
        while self._untaken and self._untaken[0][0] <= upto:
            self._untaken_bytes -= self._untaken.popleft()[1]

    # -- results ------------------------------------------------------------------------------

    def _receive(self, arrivals: list[Arrival], seq: int) -> None:
        """In the client's thread. Bounded by what the broker sends without acknowledgement."""
        self._inbox.append((arrivals, seq))
        self._arrived.set()

    def _take(self) -> None:
        while self._inbox:
            arrivals, seq = self._inbox[0]
            self._heard_s = time.monotonic()
            if not self._unsynced:
                self._unsynced_s = self._heard_s
            first = seq - len(arrivals) + 1
            for k, arrival in enumerate(arrivals):
                self._settle(arrival, first + k)
                self._unsynced_bytes += len(arrival.payload)
            self._seq = seq or self._seq
            # An empty one is a repetition: it still wants to be acknowledged.
            self._unsynced += max(1, len(arrivals))
            self._inbox.popleft()

    def _settle(self, arrival: Arrival, seq: int) -> None:
        line = arrival.number if arrival.retry_of is None else arrival.retry_of
        known = self._open.pop(line, None)
        if known is None:
            if self._read_upto < line <= self._adopt_upto:
                self._early.setdefault(line, []).append((seq, arrival))
            elif arrival.retry_of is not None and line in self._dead:
                self._retried(line, arrival)
            else:
                self._summary.duplicates += 1
            return
        self._open_of[known.model] -= 1
        if not self._open_of[known.model]:
            del self._open_of[known.model]
        if not self._write(line, known, arrival):
            self._summary.duplicates += 1

    def _settle_early(self, lines: Iterable[int]) -> None:
        """What came of these lines before they were read; nobody waits for that of a bad one."""
        for line in lines if self._early else ():
            for seq, arrival in self._early.pop(line, ()):
                # Now it can be acknowledged, and the broker may have sent all that it may.
                self._unsynced += 1
                self._settle(arrival, seq)

    def _write(self, line: int, known: OpenLine, arrival: Arrival) -> bool:
        self._rows += 1
        if arrival.status == Status.OK:
            prompt_tokens, output_tokens = usage_of(arrival.payload)
            self._lengths.learn(known.length_tokens, prompt_tokens)
            if output_tokens is not None:
                self._summary.output_tokens = (self._summary.output_tokens or 0) + output_tokens
            return self._output.write_result(line, known.custom_id, arrival.payload, url=known.url)
        if arrival.status == Status.TOO_LONG:
            return self._output.write_result(line, known.custom_id, self._too_long(line, known))
        if arrival.status == Status.REFUSED:
            self._refused.add(line)
        if arrival.status == Status.DEAD and len(self._dead) < DEAD_LINES_MAX:
            self._dead[line] = known
        status = status_name(arrival.status)
        error = Result(line, None, status, arrival.payload).error
        code, text = (error.code, error.text) if error is not None else (status, "")
        return self._output.write_failure(line, known.custom_id, code, text)

    def _retried(self, line: int, arrival: Arrival) -> None:
        """An operator requeued a dead item whose failure this run has written already."""
        if arrival.status not in (Status.OK, Status.TOO_LONG):
            return
        known, body = self._dead[line], arrival.payload
        if arrival.status == Status.TOO_LONG:
            body = self._too_long(line, known)
        if self._output.write_retried(line, known.custom_id, body, url=known.url):
            del self._dead[line]
            self._replaced.add(known.custom_id)

    def _retries_to_come(self) -> bool:
        """Whether dead lines were requeued; a result that comes replaces the failure."""
        if not self._dead:
            return False
        self._take()
        self._sync()
        return self._watch.retrying(time.monotonic(), self._seq - self._acked_seq)

    def _too_long(self, line: int, known: OpenLine) -> bytes:
        self._summary.too_long += 1
        return too_long_body(known.url, known.model, f"{self._output.job.generation}-{line}")

    def _sync(self) -> None:
        """Rows to disk, then the acknowledgement of everything before the first early result."""
        self._output.sync()
        self._unsynced = self._unsynced_bytes = 0
        safe = next(iter(self._early.values()))[0][0] - 1 if self._early else self._seq
        if safe > self._acked_seq:
            self._client.acknowledge(safe)
            self._acked_seq = safe

    # -- time ---------------------------------------------------------------------------------

    def _step(self, wait_s: float) -> None:
        """Deal with what has arrived, waiting for it if there is nothing, and with the time."""
        if wait_s and not self._inbox:
            self._arrived.wait(wait_s)
        self._arrived.clear()
        self._take()
        now = time.monotonic()
        if self._unsynced and (
            self._unsynced >= SYNC_ITEMS
            or self._unsynced_bytes >= SYNC_BYTES
            or now - self._unsynced_s >= SYNC_S
            or self._starving()
        ):
            self._sync()
        if self._options.stop.is_set():
            raise _Stopped
        if now >= self._next_report_s:
            self._next_report_s = now + REPORT_S
            self._report(now)
        self._forget_taken()
        settled = not (self._untaken or self._unsynced or self._inbox)
        self._watch.check(now, self._heard_s, self._open_of, settled=settled)

    def _starving(self) -> bool:
        """Whether a full broker waits for acknowledgements more than it has left to do."""
        waiting = self._client.unaccepted_items
        return waiting > 0 and len(self._open) - waiting <= self._unsynced

    def _report(self, now: float) -> None:
        if self._options.progress is None:
            return
        output, tokens = self._output, self._summary.output_tokens
        failed = output.failures_total + output.bad_lines_total
        self._options.progress(
            self._meter.progress(
                now,
                self._rows,
                tokens,
                done=output.results_total + failed,
                failed=failed,
                open=len(self._open),
                total=self._total,
                total_exact=self._total_exact,
            )
        )
