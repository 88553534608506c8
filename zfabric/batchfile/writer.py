"""Results of a batch file: appended as they land, each custom_id once, resumable after any crash.

Results go to the output file; failures and bad input lines go to the errors file. `sync` must
return before a result is acknowledged to the broker: what was acknowledged is then on disk, and
what was not comes again, to be dropped here if its row did survive.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from zfabric.batchfile.digests import DigestSet
from zfabric.batchfile.job import (
    InputIdentity,
    Job,
    claimant_of,
    errors_path_for,
    holder_of,
    load_job,
    sidecar_path,
    sync_directory,
)
from zfabric.batchfile.lines import compact_json, parse_json
from zfabric.batchfile.reader import BadLine
from zfabric.batchfile.rows import InUse, Row, RowFile, Scan
from zfabric.errors import ConfigError, StorageError

STATUS_OK = 200
# What a response body of each endpoint cannot be without.
LIST_OF = {
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/embeddings": "data",
}
# Failures of earlier runs that an operator may still have retried: as many as are remembered.
DEAD_IDS_MAX = 100_000


class BatchOutput:
    """The output and errors files of one job. Counts include the rows of earlier runs."""

    def __init__(self, output: RowFile, errors: RowFile, job: Job) -> None:
        self.job = job
        self.results_total = 0
        self.failures_total = 0
        self.bad_lines_total = 0
        # whether the job has a new name because its requests go to another model now
        self.model_changed = False
        # custom_ids of earlier runs: dead items, and failures that have a result as well
        self.dead: set[str] = set()
        self.outdated: set[str] = set()
        self._output = output
        self._errors = errors
        folder = output.path.parent
        self._done, self._failed = DigestSet(folder), DigestSet(folder)

    @classmethod
    def open(
        cls,
        output: Path,
        *,
        input_path: Path,
        errors: Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        retry_failed: bool = False,
        force: bool = False,
        model: str | None = None,
    ) -> Self:
        """Lock both files and prepare them: empty, overwritten, or resumed.

        `resume` keeps every whole row, cuts what a crash has torn, and skips what is done; with
        nothing there it starts afresh. `retry_failed` resumes too, but drops the failures, to be
        run again under a new generation of the job. `force` resumes with another input or errors
        file. `model` is what replaces the model of every request: where it is not what it was,
        what is not done is to be sent again, so the job gets a new generation. Raises ConfigError:
        a non-empty file without `resume` or `overwrite`, another input, a foreign file, an errors
        file that another run wrote, or files in use by another run (naming its pid).
        """
        resume = resume or retry_failed
        if resume and overwrite:
            raise ConfigError("--overwrite and --resume exclude each other; choose one")
        identity = InputIdentity.of(input_path)
        output, had_output = output.resolve(), output.exists()
        with ExitStack() as undo:
            output_file = _open(output, output)
            undo.callback(output_file.close)
            job = load_job(output, strict=resume)
            if errors is None:
                errors = Path(job.errors) if job and resume else errors_path_for(output)
            errors = errors.resolve()
            if len({Path(identity.path), output, errors, sidecar_path(output)}) < 4:
                raise ConfigError("the input, output and errors files must be different files")
            same = job if resume and job and not _differs(job, identity, errors, force) else None
            if not (had_output and errors.exists()):
                same = None
            errors_file = _open(errors, output)
            undo.callback(errors_file.close)
            fresh = Job.fresh(output, identity, errors, model, former=job)
            opened = cls(output_file, errors_file, fresh)
            opened._refuse_others_errors(job)
            if overwrite:
                opened._empty()
            elif resume:
                opened._resume(same, known=job is not None, retry_failed=retry_failed)
            else:
                opened._refuse_rows()
            opened.job.save(output)
            undo.pop_all()
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def superseded_cancelled(self) -> None:
        """The broker has none of the jobs before this one any more. Raises ConfigError."""
        if self.job.superseded:
            self.job = replace(self.job, superseded=())
            self.job.save(self._output.path)

    def is_done(self, custom_id: str) -> bool:
        """Whether a result or a failure of `custom_id` has been written."""
        return custom_id in self._done

    def write_result(
        self,
        line_number: int,
        custom_id: str,
        body: bytes,
        *,
        url: str | None = None,
        request_id: str | None = None,
    ) -> bool:
        """Append a result, `body` being the response as JSON; False if the id is done already.

        A body that is not JSON, or none of the endpoint `url`, is written as a failure,
        `bad_result`. Raises StorageError.
        """
        try:
            row = self._result_row(line_number, custom_id, body, url, request_id)
        except ValueError as error:
            text = f"the engine's result cannot be used: {error}"
            return self.write_failure(line_number, custom_id, "bad_result", text)
        if not self._done.add(custom_id):
            return False
        self._output.append(row)
        self.results_total += 1
        return True

    def write_retried(self, line_number: int, custom_id: str, body: bytes, *, url: str) -> bool:
        """Append the result of a line whose failure has a row already; see `drop_failures`.

        False if it would be a failure, too: then that row stays. Raises StorageError.
        """
        try:
            row = self._result_row(line_number, custom_id, body, url, None)
        except ValueError:
            return False
        self._output.append(row)
        self.results_total += 1
        self.failures_total -= 1
        return True

    def write_failure(self, line_number: int, custom_id: str, code: str, message: str) -> bool:
        """Append a request's failure; False if the id is done already. Raises StorageError."""
        if not self._done.add(custom_id):
            return False
        error = {"code": code, "message": message}
        self._errors.append(compact_json(self._row(line_number, custom_id, None, error)))
        self.failures_total += 1
        return True

    def write_bad_line(self, bad: BadLine) -> bool:
        """Append a line that could not be read; False if a former run did. Raises StorageError."""
        if not self._done.add(_line_key(bad.line_number)):
            return False
        error = {"code": bad.code, "message": f"line {bad.line_number}: {bad.reason}"}
        row = self._row(bad.line_number, bad.custom_id, None, error)
        self._errors.append(compact_json(row | {"line": bad.line_number}))
        self.bad_lines_total += 1
        return True

    def sync(self) -> None:
        """Return once every row written is on disk; only then acknowledge. Raises StorageError."""
        self._output.sync()
        self._errors.sync()

    def close(self) -> None:
        """Sync, and let another run have the files. Raises StorageError if the sync fails."""
        try:
            self.sync()
        finally:
            self._output.close()
            self._errors.close()

    def _result_row(
        self, line: int, custom_id: str, body: bytes, url: str | None, request_id: str | None
    ) -> bytes:
        """The row of a result. Raises ValueError for a body that is none of the endpoint `url`."""
        answer = parse_json(body)
        wanted = LIST_OF.get(url or "")
        if wanted and not (isinstance(answer, dict) and type(answer.get(wanted)) is list):
            raise ValueError(f"it is no response of {url}, which has a list {wanted!r}")
        response = {
            "status_code": STATUS_OK,
            "request_id": request_id or f"req_{self._line_id(line)}",
            "body": answer,
        }
        return compact_json(self._row(line, custom_id, response, None))

    def _row(self, line: int, custom_id: str | None, response: Row | None, error: object) -> Row:
        row_id = f"batch_req_{self._line_id(line)}"
        return {"id": row_id, "custom_id": custom_id, "response": response, "error": error}

    def _line_id(self, line_number: int) -> str:
        """The same 16 hexadecimal digits whenever this job writes this line."""
        return xxhash.xxh3_64_hexdigest(f"{self.job.name}:{line_number}".encode())

    def _refuse_rows(self) -> None:
        for file in (self._output, self._errors):
            if file.size_bytes:
                raise ConfigError(
                    f"{file.path} is not empty: continue it with --resume, or start again with "
                    "--overwrite"
                )

    def _refuse_others_errors(self, job: Job | None) -> None:
        """Rows of the errors file must be this job's: neither trusted nor erased otherwise."""
        errors = self._errors.path
        other = claimant_of(errors, self._output.path)
        if other is not None:
            raise ConfigError(
                f"{errors} is the errors file of {other}; name another one with --errors"
            )
        if self._errors.size_bytes and (job is None or Path(job.errors) != errors):
            raise ConfigError(
                f"{errors} has rows, and nothing says that a run of {self._output.path} wrote "
                "them; remove it, or name another one with --errors"
            )

    def _empty(self) -> None:
        """Erase the failures while the old job vouches for them, then the job, then its results.

        So no crash leaves results of an old job to a new one, or failures to nobody.
        """
        self._errors.truncate(0)
        path = sidecar_path(self._output.path)
        try:
            path.unlink(missing_ok=True)
            sync_directory(path.parent)
        except OSError as error:
            raise StorageError(f"cannot remove {path}: {error.strerror}") from None
        self._output.truncate(0)

    def _resume(self, same: Job | None, *, known: bool, retry_failed: bool) -> None:
        """Take in what the files hold, then repair them.

        `same` is the job to continue; None renews it, because the broker would take requests that
        it answered before for answered. `known` says that a sidecar vouches for the files.
        """

        def take_error(row: Row) -> None:
            same_lines = same is not None and same.model == self.job.model
            self._take_error(row, retry_failed=retry_failed, same_lines=same_lines)

        scans = (self._output.scan(self._take_result), self._errors.scan(take_error))
        for file, scan in zip((self._output, self._errors), scans, strict=True):
            if not known:
                _refuse_foreign(file, scan)
        retry_failed = retry_failed and self.failures_total > 0
        self.model_changed = same is not None and same.model != self.job.model
        whole = all(scan.tail_only for scan in scans)
        if same and whole and not retry_failed and not self.model_changed:
            self.job = same
        # The name first: were rows dropped before it, a crash between would keep the old name.
        self.job.save(self._output.path)
        _repair(self._output, scans[0])
        judged_anew = same is None or self.model_changed
        if retry_failed or (judged_anew and self.bad_lines_total):
            self._drop_errors(failures=retry_failed, bad_lines=judged_anew)
        else:
            _repair(self._errors, scans[1])

    def _drop_errors(self, *, failures: bool, bad_lines: bool) -> None:
        """What is to be tried again. Which lines are bad depends on the input and the model."""
        self._errors.rewrite(lambda row: not (bad_lines if _is_bad_line(row) else failures))
        if failures:
            self.failures_total = 0
        if bad_lines:
            self.bad_lines_total = 0

    def _take_result(self, row: Row) -> None:
        self._done.add(_text(row["custom_id"]))
        self.results_total += 1

    def _take_error(self, row: Row, *, retry_failed: bool, same_lines: bool) -> None:
        if _is_bad_line(row):
            self.bad_lines_total += 1
            if same_lines:
                self._done.add(_line_key(row["line"]))
            return
        custom_id = _text(row["custom_id"])
        if custom_id in self._done and custom_id not in self._failed:
            self.outdated.add(row["custom_id"])
            return
        self.failures_total += 1
        self._failed.add(custom_id)
        if not retry_failed:
            self._done.add(custom_id)
            if _code(row) == "dead" and len(self.dead) < DEAD_IDS_MAX:
                self.dead.add(row["custom_id"])


def _differs(job: Job, identity: InputIdentity, errors: Path, force: bool) -> bool:
    """Whether `job` had another input or errors file. Raises ConfigError unless `force`."""
    different = identity.difference(job.input)
    if different is None and str(errors) != job.errors:
        different = f"its errors file was {job.errors}"
    if different is not None and not force:
        raise ConfigError(
            f"the output belongs to another run: {different}. Start again with --overwrite, or "
            "continue all the same with --force"
        )
    return different is not None


def _open(path: Path, output: Path) -> RowFile:
    try:
        return RowFile.open(path)
    except InUse:
        holder = holder_of(output) if path == output else "another process"
        raise ConfigError(
            f"{path} is being written by {holder}; wait for it to end, or name another file"
        ) from None


def _refuse_foreign(file: RowFile, scan: Scan) -> None:
    """A file that no job vouches for may lose its last line only, and must hold a whole row."""
    if scan.damaged and (scan.damaged > 1 or not scan.tail_only or not scan.rows):
        raise ConfigError(
            f"{file.path} holds lines that are not batch results; name another file, or start "
            "again with --overwrite"
        )


def _repair(file: RowFile, scan: Scan) -> None:
    """Remove what a crash has torn: at the end by cutting, elsewhere by writing the file anew."""
    if not scan.tail_only:
        file.rewrite(lambda row: True)
    elif scan.damaged:
        file.truncate(scan.end_bytes)


def _is_bad_line(row: Row) -> bool:
    return type(row.get("line")) is int


def _code(row: Row) -> object:
    error = row.get("error")
    return error.get("code") if isinstance(error, dict) else None


def _line_key(line_number: int) -> bytes:
    """A key that is no UTF-8, so no custom_id can be it."""
    return b"\xff" + str(line_number).encode()


def _text(custom_id: object) -> bytes:
    return custom_id.encode("utf-8", "surrogatepass") if isinstance(custom_id, str) else b"\xff"
