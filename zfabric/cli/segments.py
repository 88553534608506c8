"""`zfabric segments`: look into a data directory without touching it, live or damaged."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric.cli import common
from zfabric.errors import ConfigError, StorageError
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.pins import Hole

EXIT_DAMAGE = 1
# A file that seems damaged may be in the middle of a write, or of getting a hole.
LOOKS_MAX, LOOK_AGAIN_S = 2, 0.1
LS_TEXT = """
List the segment files of a data directory: model, shape, lane, entries, live ones, bytes. Reads
only; the broker may be running.
"""
VERIFY_TEXT = """
Check every header and every entry of a data directory against its checksums, and the catalog too.
Prints what is damaged and why. Reads only; the broker may be running. Exit code 1 on damage.
"""


def add(commands: common.Commands) -> None:
    """Add the commands."""
    group = common.add_command(
        commands,
        "segments",
        lambda args: _need_more(),
        "segment files of a data directory",
        "Look into a data directory without touching it.",
        "zfabric segments verify ./fabric",
    )
    subcommands = group.add_subparsers(title="commands", metavar="COMMAND")
    for name, run, summary, text in (
        ("ls", run_ls, "list segment files", LS_TEXT),
        ("verify", run_verify, "check every record", VERIFY_TEXT),
    ):
        parser = common.add_command(
            subcommands, name, run, summary, text, f"zfabric segments {name} ./fabric"
        )
        parser.add_argument("directory", metavar="DIR", type=Path, help="the broker's --data")
        common.add_json(parser)


def _need_more() -> int:
    raise ConfigError("say what to do: zfabric segments ls DIR, or verify DIR")


def run_ls(args: argparse.Namespace) -> int:
    """List every file."""
    rows = [file for file in _files(args.directory) if "error" not in file]
    if args.json:
        common.show_json([{k: v for k, v in row.items() if k != "damage"} for row in rows])
        return 0
    headers = ("file", "kind", "model", "shape", "lane", "entries", "live", "bytes")
    cells = [
        [
            row["file"],
            row["kind"],
            row["model"],
            row["signature"],
            row["lane"],
            row["entries"],
            row["live"],
            row["bytes"],
        ]
        for row in rows
    ]
    common.show(common.table(headers, cells) if cells else "no segment files")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Check every file; 1 where something is damaged."""
    from zfabric.cataloglog import CATALOG

    problems: list[dict[str, Any]] = []
    reason, _ = _catalog(args.directory)
    files = list(_files(args.directory))
    for file in files:
        if "error" in file:
            problems.append({"file": file["file"], "offset": 0, "reason": file["error"]})
        problems += [{"file": file["file"], **damage} for damage in file.get("damage", ())]
    if reason is not None:
        problems.append({"file": CATALOG, "offset": 0, "reason": reason})
    entries = sum(file.get("entries", 0) for file in files)
    if args.json:
        common.show_json({"files": len(files), "entries": entries, "damaged": problems})
    else:
        for problem in problems:
            number = f", item {problem['number']}" if problem.get("number") is not None else ""
            common.show(f"{problem['file']} at {problem['offset']}: {problem['reason']}{number}")
        verdict = f"{len(problems)} damaged" if problems else "all whole"
        common.show(f"{counted(len(files), 'file')}, {counted(entries, 'entry')}: {verdict}")
    return EXIT_DAMAGE if problems else 0


def _catalog(directory: Path) -> tuple[str | None, dict[int, list[Hole]]]:
    """(what is wrong with the catalog, the holes that it tells of)."""
    from zfabric import catalog
    from zfabric.cataloglog import CATALOG
    from zfabric.pins import Hole

    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give the broker's --data")
    try:
        known, _ = catalog.read((directory / CATALOG).read_bytes())
    except FileNotFoundError:
        return "missing", {}
    except StorageError as error:
        return str(error), {}
    holes = {n: [Hole(*r["hole"]) for r in records] for n, records in known.holes.items()}
    return None if known.store_id else "does not begin with its store record", holes


def _files(directory: Path) -> Iterator[dict[str, Any]]:
    """Every segment file, read whole, one after the other."""
    from zfabric.files import OUTBOX, SEGMENTS
    from zfabric.osfiles import OsFiles

    _, holes = _catalog(directory)
    for part in (SEGMENTS, OUTBOX):
        # A broker at work removes directories that have become empty.
        for path in OsFiles(directory).find(directory / part, ".seg"):
            try:
                row = _look(directory, path, holes)
            except FileNotFoundError:
                continue
            except OSError as error:
                row = {"error": error.strerror or str(error), "bytes": 0}
            yield {"file": str(path.relative_to(directory)), **row}


def _look(directory: Path, path: Path, holes: Mapping[int, list[Hole]]) -> dict[str, Any]:
    """One file. What a running broker is just writing is looked at again."""
    row = _read(directory, path, holes)
    for _ in range(LOOKS_MAX):
        if not row.get("damage") and "error" not in row:
            break
        time.sleep(LOOK_AGAIN_S)
        row = _read(directory, path, _catalog(directory)[1])
    return row


def _read(directory: Path, path: Path, holes: Mapping[int, list[Hole]]) -> dict[str, Any]:
    from zfabric.entries import Damage, scan
    from zfabric.files import place_of
    from zfabric.pins import around
    from zfabric.segment import HEADER_BYTES, decode_word, is_whole, read_header, words_of

    data = path.read_bytes()
    try:
        header = read_header(data[:HEADER_BYTES])
    except StorageError as error:
        return {"error": str(error), "bytes": len(data)}
    if directory / place_of(header) != path:
        return {"error": "its header does not fit its path", "bytes": len(data)}
    words, _ = words_of(data[HEADER_BYTES : header.data_offset])
    entries = live = 0
    damage: list[dict[str, Any]] = []
    if not is_whole(data[:HEADER_BYTES], header):
        damage.append({"offset": 0, "reason": "a header copy is damaged", "number": None})
    ranges = around(holes.get(header.nonce, ()), header.data_offset)
    body = data[header.data_offset :]
    parts = [scan(header, body, start=start, stop=stop) for start, stop in ranges]
    for found in itertools.chain(*parts):
        if isinstance(found, Damage):
            row = {"offset": found.offset, "reason": found.reason, "number": found.number}
            damage.append(row)
            continue
        entries += 1
        live += not decode_word(words[found.place])[0]
    return {
        "kind": header.kind,
        "model": header.model,
        "signature": f"{header.signature:016x}",
        "lane": header.lane,
        "entries": entries,
        "live": live,
        "bytes": len(data),
        "damage": damage,
    }
