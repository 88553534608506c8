"""Jobs: what a run of a batch file is called, and which input its output belongs to.

The broker knows a run by its job name and its items by line number, so a resumed run must use the
name of the run that it continues, and any other run must not: a broker that remembers the name
would take new items for old ones. So the name holds a generation, drawn at random for a fresh run
and again when requests that the broker has answered, or holds for another model, are sent once
more. It is kept in `<output>.zfabric.json`, beside the identity of the input, the override of the
model and the errors file, for whose rows it vouches; written atomically.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from zfabric.errors import ConfigError
from zfabric.shapes import NAME_BYTES_MAX

SIDECAR_VERSION = 1
SIDECAR_SUFFIX = ".zfabric.json"
OUTPUT_SUFFIX, ERRORS_SUFFIX = ".jsonl", ".errors.jsonl"
OTHER_ERRORS_SUFFIX = ".errors"
# Enough of the first line to tell two inputs apart; a line may be 64 MiB.
FIRST_LINE_BYTES = 65_536
# Pieces of an input that are looked at, from all over it: all of one of 256 KiB, at the price of
# some reads of a large one.
SAMPLES, SAMPLE_BYTES = 64, 4_096
GENERATION_BYTES = 4


@dataclass(frozen=True, slots=True)
class InputIdentity:
    """What tells one input file from another: path, size in bytes, digest of its first line.

    And `sample`, a digest of pieces of it; empty where a sidecar of an earlier release has none.
    """

    path: str
    size_bytes: int
    first_line: str
    sample: str = ""

    @classmethod
    def of(cls, path: Path) -> InputIdentity:
        """The identity of the file at `path`. Raises ConfigError if it cannot be read."""
        try:
            # Looked at before it is opened: opening a pipe waits for its other end.
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(f"input {path} is not a regular file: save it to one first")
            with path.open("rb") as stream:
                size_bytes = os.fstat(stream.fileno()).st_size
                digest = xxhash.xxh3_64_hexdigest(stream.readline(FIRST_LINE_BYTES))
                sample = _sample(stream, size_bytes)
        except OSError as error:
            raise ConfigError(f"cannot read input {path}: {error.strerror}") from None
        return cls(str(path.resolve()), size_bytes, digest, sample)

    def difference(self, other: InputIdentity) -> str | None:
        """What differs, in words, or None."""
        if self.path != other.path:
            return f"its input was {other.path}, not {self.path}"
        if self.size_bytes != other.size_bytes:
            return f"its input had {other.size_bytes} bytes and has {self.size_bytes} now"
        if self.first_line != other.first_line:
            return "the first line of its input has changed"
        if self.sample != other.sample and other.sample:
            return "its input has changed, although it has as many bytes"
        return None


def _sample(stream: BinaryIO, size_bytes: int) -> str:
    digest = xxhash.xxh3_64()
    for k in range(SAMPLES):
        stream.seek(size_bytes * k // SAMPLES)
        digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_paths(source: Path, output: Path, errors: Path | None) -> None:
    """Raises ConfigError for files that cannot be read or written; makes and changes nothing.

    `errors` None stands for where failures go by themselves.
    """
    InputIdentity.of(source)
    _check_writable(output)
    errors = errors_path_for(output) if errors is None else errors
    _check_writable(errors)
    names = {path.resolve() for path in (source, output, errors)}
    there = [path.stat() for path in names if path.exists()]
    # One file may have several names: emptying the output would empty the input.
    if len(names) < 3 or len({(each.st_dev, each.st_ino) for each in there}) < len(there):
        raise ConfigError("the input, output and errors files must be different files")


def _check_writable(path: Path) -> None:
    if not path.name:
        raise ConfigError(f"{path} is no file: say where the rows go")
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no directory {path.parent}: make it, or name another file")
        # What lies beside an output has a longer name than the output.
        sidecar_path(path).exists()
        path.resolve()
        if path.exists():
            if not path.is_file():
                raise ConfigError(f"{path} is not a regular file: name another one")
            allowed = os.access(path, os.R_OK | os.W_OK)
        else:
            allowed = os.access(path.parent, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}") from None
    except RuntimeError:
        raise ConfigError(f"cannot use {path}: it is a link that leads to itself") from None
    if not allowed:
        raise ConfigError(f"cannot write {path}: you are not allowed to")


@dataclass(frozen=True, slots=True)
class Job:
    """One run and those that resume it.

    `errors` is the path of its errors file, `model` what replaces the model of every request,
    `superseded` the names before this one of which the broker may still have work.
    """

    name: str
    generation: str
    input: InputIdentity
    errors: str
    model: str | None = None
    superseded: tuple[str, ...] = ()

    @classmethod
    def fresh(
        cls,
        output: Path,
        identity: InputIdentity,
        errors: Path,
        model: str | None = None,
        former: Job | None = None,
    ) -> Job:
        """A job that no broker has seen before, in place of `former`."""
        generation = secrets.token_hex(GENERATION_BYTES)
        superseded = () if former is None else (*former.superseded, former.name)
        name = job_name(output, generation)
        return cls(name, generation, identity, str(errors), model, superseded)

    def renewed(self, output: Path) -> Job:
        """The same job under a name that no broker has seen before."""
        return Job.fresh(output, self.input, Path(self.errors), self.model, self)

    def save(self, output: Path) -> None:
        """Write the sidecar of `output`, atomically. Raises ConfigError if that fails."""
        path = sidecar_path(output)
        row = {"version": SIDECAR_VERSION, "pid": os.getpid()} | asdict(self)
        temporary = path.with_name(path.name + ".tmp")
        try:
            with temporary.open("wb") as stream:
                stream.write(json.dumps(row, indent=2).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def job_name(output: Path, generation: str) -> str:
    """`batch-<file name>-<xxh3_64 of the absolute path>-<generation>`, at most 255 bytes."""
    path = output.resolve()
    digest = xxhash.xxh3_64_intdigest(os.fsencode(path))
    tail = f"-{digest:016x}-{generation}"
    room = NAME_BYTES_MAX - len("batch-") - len(tail)
    name = "".join(c if c.isprintable() else "_" for c in path.name)
    return f"batch-{name.encode('utf-8', 'replace')[:room].decode('utf-8', 'ignore')}{tail}"


def errors_path_for(output: Path) -> Path:
    """Where failures go when no errors file is named; no two outputs have the same.

    out.jsonl has out.errors.jsonl; any other name has .errors appended: out.json.errors.
    """
    if output.name.endswith(OUTPUT_SUFFIX):
        return output.with_name(output.name.removesuffix(OUTPUT_SUFFIX) + ERRORS_SUFFIX)
    return output.with_name(output.name + OTHER_ERRORS_SUFFIX)


def claimant_of(errors: Path, output: Path) -> Path | None:
    """Another output whose job keeps its failures in `errors`, or None.

    Jobs are sought where the two files are; a job elsewhere is not found.
    """
    own = sidecar_path(output)
    for folder in {errors.parent, output.parent}:
        for path in sorted(folder.glob("*" + SIDECAR_SUFFIX)):
            other = path.with_name(path.name.removesuffix(SIDECAR_SUFFIX))
            if path == own or not other.exists():
                continue
            job = load_job(other, strict=False)
            if job is not None and Path(job.errors) == errors:
                return other
    return None


def sidecar_path(output: Path) -> Path:
    """The file that remembers the job of `output`."""
    return output.with_name(output.name + SIDECAR_SUFFIX)


def load_job(output: Path, *, strict: bool = True) -> Job | None:
    """The job that `output` belongs to; None if no sidecar is there.

    Raises ConfigError for a sidecar that cannot be read; unless `strict`, it counts as absent.
    """
    try:
        row = _sidecar(output)
        return None if row is None else _job(output, row)
    except ConfigError:
        if strict:
            raise
        return None


def _job(output: Path, row: dict[str, Any]) -> Job:
    try:
        if row["version"] != SIDECAR_VERSION:
            raise ValueError(f"version {row['version']!r}")
        identity = InputIdentity(**row["input"])
        texts = (str(row["name"]), str(row["generation"]))
        superseded = tuple(map(str, row.get("superseded", ())))
        return Job(*texts, identity, str(row["errors"]), row.get("model"), superseded)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{sidecar_path(output)} is not a job of this version ({error}); "
            "start again with --overwrite"
        ) from None


def holder_of(output: Path) -> str:
    """Who writes `output`, as the sidecar says: "pid 123", or "another process"."""
    try:
        row = _sidecar(output)
    except ConfigError:
        row = None
    return f"pid {row['pid']}" if row and isinstance(row.get("pid"), int) else "another process"


def sync_directory(directory: Path) -> None:
    """Make names created or replaced in `directory` survive a power loss. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sidecar(output: Path) -> dict[str, Any] | None:
    path = sidecar_path(output)
    try:
        row = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; start again with --overwrite") from None
    return row if isinstance(row, dict) else {}
