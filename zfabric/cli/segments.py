"""`zfabric segments`: look into a data directory without touching it, live or damaged."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric.cli import common
from zfabric.errors import ConfigError, StorageError
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.catalog import Catalog

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
    rows = []
    for file in _files(args.directory):
        if "error" in file:
            common.say(f"{file['file']}: {file['error']}")
        else:
            rows.append(file)
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


def _catalog(directory: Path) -> tuple[str | None, Catalog]:
    """(what is wrong with the catalog, what it says; nothing where that cannot be known)."""
    from zfabric import catalog
    from zfabric.cataloglog import CATALOG

    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give the broker's --data")
    try:
        known, _ = catalog.read((directory / CATALOG).read_bytes())
    except FileNotFoundError:
        return "missing", catalog.Catalog()
    except StorageError as error:
        return str(error), catalog.Catalog()
    return None if known.store_id else "does not begin with its store record", known


def _files(directory: Path) -> Iterator[dict[str, Any]]:
    """Every segment file, read whole, one after the other."""
    from zfabric.files import OUTBOX, SEGMENTS
    from zfabric.osfiles import OsFiles
    from zfabric.segment import ITEMS, RESULTS

    _, known = _catalog(directory)
    for part, kind in ((SEGMENTS, ITEMS), (OUTBOX, RESULTS)):
        # A broker at work removes directories that have become empty.
        for path in OsFiles(directory).find(directory / part, ".seg"):
            try:
                row = _look(directory, path, kind, known)
            except FileNotFoundError:
                continue
            except OSError as error:
                row = {"error": error.strerror or str(error), "bytes": 0}
            if row is not None:
                yield {"file": str(path.relative_to(directory)), **row}


def _look(directory: Path, path: Path, kind: str, known: Catalog) -> dict[str, Any] | None:
    """One file; None where all of it is over. What a broker is just writing is looked at again."""
    from zfabric.recovery import nonce_of

    for look in range(LOOKS_MAX + 1):
        if look:
            time.sleep(LOOK_AGAIN_S)
            known = _catalog(directory)[1]
        if nonce_of(path) in known.retired:
            return None
        row = _read(directory, path, kind, known)
        if not row.get("damage") and "error" not in row:
            break
    return row


def _read(directory: Path, path: Path, kind: str, known: Catalog) -> dict[str, Any]:
    """What a start of the broker would find in a file."""
    from zfabric.files import place_of
    from zfabric.scanning import scan_file
    from zfabric.segment import LIVE_WORD, word_offset

    data = path.read_bytes()
    try:
        found = scan_file(
            path,
            kind,
            data,
            lambda header: directory / place_of(header),
            lambda nonce: known.holes.get(nonce, ()),
        )
    except StorageError as error:
        return {"error": str(error), "bytes": len(data)}
    damage = [
        {
            "offset": word_offset(place),
            "reason": "its state word is damaged",
            "number": found.numbers[place] or None,
        }
        for place in found.healed
        if place < found.places
    ]
    damage += [{"offset": d.offset, "reason": d.reason, "number": d.number} for d in found.damages]
    if found.header_damaged:
        damage.insert(0, {"offset": 0, "reason": "a header copy is damaged", "number": None})
    entries = [place for place, number in enumerate(found.numbers) if number]
    return {
        "kind": kind,
        "model": found.header.model,
        "signature": f"{found.header.signature:016x}",
        "lane": found.header.lane,
        "entries": len(entries),
        "live": sum(found.words[place] == LIVE_WORD for place in entries),
        "bytes": len(data),
        "damage": damage,
    }
