"""Addresses: where a broker listens and where clients find it, as text and as (host, port).

Only TCP exists. Nothing here resolves a name or opens a socket.
"""

from __future__ import annotations

import ipaddress
import re

from zfabric.errors import ConfigError

PORT_MAX = 65_535
SCHEME = "tcp://"
# What libzmq connects to; with anything else it fails, or means more than a host (`;`).
HOST_PORT = re.compile(
    r"(?:\[([0-9a-f.]*:[0-9a-f:.]*(?:%[\w.-]+)?)\]|([a-z0-9][\w.%-]*|\*)):(\d{1,5})",
    re.ASCII | re.IGNORECASE,
)


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of `tcp://host:port` or `host:port`; IPv6 hosts are in brackets.

    The host comes back without brackets. Raises ConfigError saying what is wrong.
    """
    wrong = f"broker address {text!r}"
    example = "(example: tcp://127.0.0.1:7410)"
    rest = text.strip().removeprefix(SCHEME)
    if "://" in rest:
        raise ConfigError(f"{wrong}: only {SCHEME} is supported {example}")
    match = HOST_PORT.fullmatch(rest)
    if match is None:
        if rest.count(":") > 1 and not rest.startswith("["):
            raise ConfigError(f"{wrong}: put an IPv6 host in brackets: tcp://[::1]:7410")
        raise ConfigError(f"{wrong} must be host:port {example}")
    host, port = match[1] or match[2], int(match[3])
    if not 1 <= port <= PORT_MAX:
        raise ConfigError(f"{wrong}: the port must be between 1 and {PORT_MAX}, not {port}")
    if host == "*":
        raise ConfigError(f"{wrong}: * is a place to bind, not to connect to {example}")
    return host, port


def format_address(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets around an IPv6 host."""
    bare = host.strip("[]")
    return f"{SCHEME}[{bare}]:{port}" if ":" in bare else f"{SCHEME}{bare}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address (127/8, ::1) or the name localhost."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"
