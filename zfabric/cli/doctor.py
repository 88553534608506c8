"""`zfabric doctor`: what of this machine would keep a broker, a worker or a client from working.

Each check is a line: ok, warn or fail, what was found, and what to do about it. Nothing is changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from zfabric.cli import common
from zfabric.config import Config
from zfabric.errors import FabricError, NotAllowed

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHON_MIN = (3, 11)
# What the package metadata asks for; kept in step by a test.
PACKAGES = {
    "pyzmq": (26,),
    "msgpack": (1, 0, 8),
    "xxhash": (3, 4),
    "sortedcontainers": (2, 4),
    "textual": (1, 0),
    "platformdirs": (4,),
    "prometheus-client": (0, 20),
}
# A broker with a thousand peers needs a descriptor for each, and some to spare.
DESCRIPTORS_MIN = 4_096
# A file of results fills the last gigabyte faster than anyone looks.
DISK_BYTES_MIN = 1 << 30
CLOCK_S_MAX = 5.0
# A clock before this release was never set.
YEAR_MIN = 2025

TEXT = """
Check this machine and, if one answers, the broker: Python, packages, ports, loopback, limits,
disk, clock. Ends with code 1 if something would not work.
"""


class Finding(NamedTuple):
    """One line of the report; `fix` is empty where all is well."""

    check: str
    state: str
    found: str
    fix: str = ""


def add(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_command(
        commands, "doctor", run, "check this machine and the broker", TEXT, "zfabric doctor"
    )
    common.add_json(parser)
    common.add_broker(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if any is a failure."""
    settings = common.load(args)
    findings = list(examine(settings))
    if args.json:
        common.show_json([finding._asdict() for finding in findings])
    else:
        width = max(len(finding.check) for finding in findings)
        for check, state, found, fix in findings:
            hint = f"  -> {fix}" if fix else ""
            common.show(f"{state:<4}  {check.ljust(width)}  {common.clean(found)}{hint}")
    return 1 if any(finding.state == FAIL for finding in findings) else 0


def examine(settings: Config) -> Iterator[Finding]:
    """Every check, in order."""
    checks: tuple[Callable[[Config], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _loopback,
        _broker,
        _descriptors,
        _disk,
        _clock,
    )
    for check in checks:
        yield from check(settings)


def package_versions() -> dict[str, str | None]:
    """Installed versions of what zfabric stands on; None where it is missing."""
    import importlib.metadata

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _python(settings: Config) -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    good = sys.version_info >= PYTHON_MIN
    fix = "" if good else "install Python 3.11 or newer"
    yield Finding("python", OK if good else FAIL, found, fix)


def _packages(settings: Config) -> Iterator[Finding]:
    for name, version in package_versions().items():
        wanted = ".".join(map(str, PACKAGES[name]))
        if version is None:
            yield Finding(name, FAIL, "not installed", f"pip install '{name}>={wanted}'")
        elif _numbers(version) < PACKAGES[name]:
            yield Finding(name, FAIL, version, f"pip install --upgrade '{name}>={wanted}'")
        else:
            yield Finding(name, OK, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; what follows a non-number is left out."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _loopback(settings: Config) -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=2):
                yield Finding("loopback", OK, f"{address[0]}:{address[1]} answers")
    except OSError as error:
        fix = "allow TCP on 127.0.0.1 (firewall, sandbox, network namespace)"
        yield Finding("loopback", FAIL, str(error), fix)


def _broker(settings: Config) -> Iterator[Finding]:
    """Whether a broker answers, or else whether one could be started."""
    host, port = settings.client.address
    try:
        with socket.create_connection((host, port), timeout=min(2.0, settings.client.timeout_s)):
            pass
    except OSError as error:
        yield from _ports(settings, f"{host}:{port} {error.strerror or error}")
        return
    from zfabric.client import Client

    try:
        client = Client(
            settings.client.broker,
            role="operator",
            timeout_s=settings.client.timeout_s,
            key=common.key_of(settings.client),
        )
    except FabricError as error:
        # A broker that asks for a key says so, and what to give it.
        holds = "something else may hold the port: zfabric broker --port N, and --broker here"
        fix = "" if isinstance(error, NotAllowed) else holds
        yield Finding("broker", FAIL, str(error), fix)
        return
    try:
        release = str(client.welcome.get("release"))
        skew_s = time.time() - float(client.stats(settings.client.timeout_s)["time"])
    finally:
        client.close()
    import zfabric

    same = release == zfabric.__version__
    found = f"{settings.client.broker} answers, release {release}"
    fix = "" if same else f"this is {zfabric.__version__}: install the same release on both"
    yield Finding("broker", OK if same else WARN, found, fix)
    good = abs(skew_s) <= CLOCK_S_MAX
    fix = "" if good else "set both clocks; events and files carry their time"
    yield Finding("broker clock", OK if good else WARN, f"{skew_s:+.1f} s from here", fix)


def _ports(settings: Config, why: str) -> Iterator[Finding]:
    fix = "start one with zfabric broker, or name another with --broker"
    yield Finding("broker", WARN, f"none answers: {why}", fix)
    for port in settings.broker.ports:
        try:
            family = socket.AF_INET6 if ":" in settings.broker.bind else socket.AF_INET
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((settings.broker.bind.strip("[]"), port))
        except OSError as error:
            fix = "another program has it: zfabric broker --port 0 takes free ones"
            yield Finding(f"port {port}", WARN, str(error.strerror), fix)
        else:
            yield Finding(f"port {port}", OK, "free")


def _descriptors(settings: Config) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = soft >= DESCRIPTORS_MIN or soft == resource.RLIM_INFINITY
    fix = "" if good else f"ulimit -n {DESCRIPTORS_MIN} before many workers connect"
    yield Finding("open files", OK if good else WARN, f"{soft:,} (hard limit {hard:,})", fix)


def _disk(settings: Config) -> Iterator[Finding]:
    place = Path(settings.broker.data or ".").resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield Finding("disk", WARN, f"{place}: {error.strerror}", "look at the file system")
        return
    writable = os.access(place, os.W_OK)
    good = free >= DISK_BYTES_MIN and writable
    found = f"{common.size(free)} free at {place}" + ("" if writable else ", not writable")
    fix = "" if good else "results are written here: make room, or run elsewhere"
    yield Finding("disk", OK if good else WARN, found, fix)


def _clock(settings: Config) -> Iterator[Finding]:
    now = time.gmtime()
    good = now.tm_year >= YEAR_MIN
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", now)
    fix = "" if good else "set the clock; events and files carry its time"
    yield Finding("clock", OK if good else WARN, found, fix)
