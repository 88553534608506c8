"""Configuration: every key of the fabric in one table, resolved once at the edge and then frozen.

The fields of `BrokerConfig`, `WorkerConfig` and `ClientConfig` are that table: each states its
type, default, unit, bounds and help. TOML keys, `ZFABRIC_*` variables, command-line flags, `config
show` and `config init` are all made from it. Precedence, highest first: flag, environment,
`./zfabric.toml`, the user's `config.toml`, default.

Environment names are `ZFABRIC_<SECTION>_<KEY>` (`ZFABRIC_BROKER_PORT`); `ZFABRIC_BROKER`, which
has no key part and so cannot clash, is the address that clients use (`client.broker`). A
variable that is set but empty counts as not set.

Units are last in names: `_s` seconds, `_ms` milliseconds, `_bytes` bytes, `_items` items. Only the
edge (a command, the SDK's constructor) calls `load`; nothing here is read at import time.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric.addresses import PORT_MAX, format_address, is_loopback, parse_address
from zfabric.config_keys import ENV_PREFIX, GIB, MIB, NO_KEY, Key, count_row, key_row, port_row
from zfabric.errors import ConfigError
from zfabric.shapes import BATCH_ITEMS_MAX, TOKENS_MAX, Contract, check_name

if TYPE_CHECKING:
    import argparse

__all__ = [
    "KEYS", "BrokerConfig", "ClientConfig", "Config", "Key", "WorkerConfig", "add_flags",
    "flags_of", "format_address", "is_loopback", "load", "parse_address"
]  # fmt: skip

FILE_NAME = "zfabric.toml"
USER_FILE_NAME = "config.toml"
# A day: longer waits are a mistake of unit (milliseconds for seconds).
WAIT_S_MAX = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """What `zfabric broker` needs. Raises ConfigError for a value or a combination out of range."""

    bind: str = key_row(
        "127.0.0.1", "address to listen on; loopback unless insecure is set", metavar="ADDRESS"
    )
    port: int = port_row(7410, "port of producers and operators; 0 takes any free ports")
    consumer_port: int | None = port_row(None, "port of workers; port + 1 when not set")
    stats_port: int | None = port_row(None, "port of the statistics feed; port + 2 when not set")
    keys: str | None = key_row(
        None,
        "directory of keys, see `zfabric keys`; without it, or with none, anyone who reaches the "
        "ports may connect",
        metavar="DIRECTORY",
    )
    insecure: bool = key_row(False, "allow a bind that is not loopback, without keys")
    data: str | None = key_row(
        None,
        "directory to keep everything in; without it everything is kept in memory",
        metavar="DIRECTORY",
    )
    durability: str = key_row(
        "fsync",
        "when something is safe, with data: when on the device (fsync) or written (os)",
        choices=("fsync", "os"),
    )
    min_free: int = key_row(
        64 * MIB, "free bytes of the disk under which nothing new is taken", unit="bytes", low=0
    )
    max_disk: int | None = key_row(
        None,
        "bytes of segments and results over which nothing new is taken; a reserve of 16 MiB comes "
        "on top; no limit when not set",
        unit="bytes",
        low=1,
    )
    memory: bool = key_row(
        False, "insist on memory, whatever sets data elsewhere; a restart loses what is queued"
    )
    lanes: int = key_row(2048, "lanes a shape may use", unit="lanes", low=1, high=2048)
    packing: str = key_row(
        "group",
        "what a batch takes: adjacent lanes until it is full (group); or one lane, padded to the "
        "longest item that it took (tight), or to the longest that waits there, as the original "
        "system did (strict)",
        choices=("strict", "tight", "group"),
    )
    policy: str = key_row(
        "lanes",
        "order of work: one shape at a time, by lanes of length (lanes) or without them (shape), "
        "or as it arrives (fifo); the last two are there to compare with",
        choices=("lanes", "shape", "fifo"),
    )
    linger_ms: float = key_row(
        200.0,
        "when a shape has run empty, wait this long for more of it before going to another, whose "
        "prefix no cache holds",
        unit="ms",
        low=0,
        high=WAIT_S_MAX * 1000,
    )
    next_shape: str = key_row(
        "most_tokens",
        "which shape follows when the current one has run empty: the one with the most tokens, or "
        "the one that shares the longest start of its components with it (affinity)",
        choices=("most_tokens", "affinity"),
    )
    max_wait_s: float = key_row(
        300.0,
        "longest that waiting work is passed over for fuller shapes; 0 is without limit",
        unit="s",
        low=0,
        high=WAIT_S_MAX,
    )
    hold_items: int = count_row(
        20_000, "items that end the wait of --hold early: enough to see the largest shape"
    )
    hold_s: float = key_row(
        5.0,
        "when work begins and more of it is announced, wait at most this long before choosing the "
        "first shape",
        unit="s",
        low=0,
        high=WAIT_S_MAX,
    )
    lease_s: float = key_row(
        10.0, "a worker silent for this long loses its work", unit="s", low=0.1, high=WAIT_S_MAX
    )
    attempts_max: int = count_row(3, "charged attempts before an item is dead", "attempts", 1000)
    slice_ms: float = key_row(
        100.0, "longest dispatch before heartbeats are served", unit="ms", low=1, high=10_000
    )
    max_items: int = count_row(4_000_000, "items the broker holds")
    max_bytes: int = count_row(4 * GIB, "payload bytes the broker holds in memory", "bytes")
    producer_items_max: int = count_row(
        1_000_000, "items of one producer accepted without an acknowledged result"
    )
    result_bytes_inflight: int = count_row(
        16 * MIB, "unacknowledged result bytes on their way to one producer", "bytes"
    )
    payload_bytes_max: int = count_row(64 * MIB, "largest payload of an item", "bytes", 1 * GIB)
    user_connections_max: int = count_row(1_000, "connections of one user's keys", "connections")
    message_items_max: int = count_row(65_536, "items in one message", high=BATCH_ITEMS_MAX)
    metrics_port: int | None = port_row(
        None, "port of Prometheus metrics at the bound address; none when not set"
    )
    metrics_bind: str | None = key_row(
        None,
        "address of the metrics, which ask for no key; the bound one when not set, loopback with "
        "keys",
        metavar="ADDRESS",
    )
    log: str = key_row(
        "text", "events on standard error, as lines of", choices=("text", "json", "off")
    )
    log_file: str | None = key_row(
        None,
        "file to log into, opened anew when it was moved away; standard error when not set",
        metavar="FILE",
    )
    record: str | None = key_row(
        None, "file to record into, for `zfabric top --replay`", metavar="FILE"
    )
    record_mib: int = count_row(512, "bytes of a recording, the oldest go first", "MiB", 1 << 20)
    hz: float = key_row(4.0, "snapshots a second", unit="Hz", low=0.1, high=60)
    heartbeat_s: float = key_row(1.0, "time between heartbeats", unit="s", low=0.05, high=60)
    drain_s: float = key_row(
        30.0, "time to finish work at the end", unit="s", low=0, high=WAIT_S_MAX
    )

    def __post_init__(self) -> None:
        _check_section("broker", self)
        if self.keys_directory is None and not self.insecure and not is_loopback(self.bind):
            raise ConfigError(
                f"broker.bind {self.bind!r} is not a loopback address, and without keys anyone who "
                "reaches the port could read and submit work: make keys with `zfabric keys make` "
                "and pass --keys, bind 127.0.0.1, or pass --insecure on a network that you trust"
            )
        if self.data is not None and self.policy == "fifo":
            raise ConfigError(
                "broker.policy fifo mixes shapes in one queue and is kept in memory only; "
                "leave out broker.data"
            )
        if self.memory and self.data is not None:
            raise ConfigError("broker.memory and broker.data exclude each other; set one of them")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"broker.lease_s {self.lease_s} must be at least twice heartbeat_s "
                f"{self.heartbeat_s}, or one late heartbeat costs a worker its work"
            )
        if self.max_bytes < self.payload_bytes_max:
            raise ConfigError(
                f"broker.max_bytes {self.max_bytes} cannot hold one payload of payload_bytes_max "
                f"{self.payload_bytes_max}"
            )
        taken = [port for port in self.ports if port]
        if max(taken, default=0) > PORT_MAX:
            raise ConfigError(
                f"broker.port {self.port} leaves no room for the consumer and stats ports behind "
                f"it; use at most {PORT_MAX - 2}, or set consumer_port and stats_port"
            )
        if len(set(taken)) < len(taken):
            raise ConfigError(f"broker ports must differ: producers, consumers, stats {self.ports}")

    @property
    def keys_directory(self) -> Path | None:
        """Where the keys are; None is without keys."""
        return None if self.keys in (None, NO_KEY) else Path(str(self.keys))

    @property
    def metrics_at(self) -> str:
        """The address of the metrics, an IPv6 one without brackets."""
        place = self.metrics_bind or (self.bind if self.keys_directory is None else "127.0.0.1")
        return place.strip("[]")

    @property
    def ports(self) -> tuple[int, int, int]:
        """Ports of producers, consumers and statistics; 0 means any free one."""
        return (
            self.port,
            _following(self.port, 1, self.consumer_port),
            _following(self.port, 2, self.stats_port),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What `zfabric worker` needs. Raises ConfigError for a value that is out of range."""

    engine: str | None = key_row(
        None,
        "engine that runs the batches: embed, llamacpp, openai, sim, transformers",
        metavar="NAME",
    )
    model: str | None = key_row(None, "model that this worker serves", metavar="NAME")
    name: str | None = key_row(
        None, "name of this worker, unique at its broker; made up when not set", metavar="NAME"
    )
    max_batch: int | None = key_row(
        None, "items in a batch at most", unit="items", low=1, high=BATCH_ITEMS_MAX
    )
    max_tokens: int | None = key_row(
        None, "padded tokens in a batch at most", unit="tokens", low=1, high=TOKENS_MAX
    )
    max_input: int | None = key_row(
        None, "longest input that the engine runs", unit="tokens", low=1, high=TOKENS_MAX
    )
    window: int = key_row(
        2, "batches held at once: running and ready", unit="batches", low=1, high=64
    )
    ragged: bool = key_row(False, "the engine does not pad: count plain tokens")
    broker_port: int | None = key_row(
        None,
        "port of workers at the broker; asked of the broker when not set, or with a key, which may "
        "not ask, the one behind its port",
        low=1,
        high=PORT_MAX,
        metavar="PORT",
    )
    log: str = key_row(
        "text", "events on standard error, as lines of", choices=("text", "json", "off")
    )

    def __post_init__(self) -> None:
        _check_section("worker", self)
        for name in ("model", "name"):
            if getattr(self, name) is not None:
                check_name(getattr(self, name), f"worker.{name}")

    def contract(self) -> Contract:
        """The four integers to register. Raises ConfigError naming every one not given."""
        if self.max_batch is None or self.max_tokens is None or self.max_input is None:
            names = [
                n for n in ("max_batch", "max_tokens", "max_input") if getattr(self, n) is None
            ]
            flags = ", ".join(KEYS[f"worker.{name}"].flag for name in names)
            raise ConfigError(
                f"a worker must say what it can take, so that no batch overflows it: give {flags} "
                "(or set them under [worker])"
            )
        return Contract(self.max_batch, self.max_tokens, self.max_input, self.ragged)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What every command that talks to a broker needs. Raises ConfigError for a bad address."""

    broker: str = key_row("tcp://127.0.0.1:7410", "address of the broker", metavar="ADDRESS")
    key: str | None = key_row(
        None,
        "file of the key to connect with, as `zfabric keys make` writes it; none is without",
        metavar="FILE",
    )
    server_key: str | None = key_row(
        None, "public key of the broker, in place of the one in the key's file", metavar="KEY"
    )
    timeout_s: float = key_row(
        10.0, "longest wait for the broker to answer", unit="s", low=0.01, high=WAIT_S_MAX
    )

    def __post_init__(self) -> None:
        _check_section("client", self)
        parse_address(self.broker)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the broker's producer socket."""
        return parse_address(self.broker)


SECTIONS: dict[str, type[BrokerConfig] | type[WorkerConfig] | type[ClientConfig]] = {
    "broker": BrokerConfig,
    "worker": WorkerConfig,
    "client": ClientConfig,
}


def _table() -> dict[str, Key]:
    table = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for row in dataclasses.fields(cls):
            kinds = typing.get_args(hints[row.name]) or (hints[row.name],)
            optional = types.NoneType in kinds
            kind = next(k for k in kinds if k is not types.NoneType)
            key = Key(section, row.name, kind, optional, row.default, **row.metadata)
            table[key.full_name] = key
    return table


KEYS: Mapping[str, Key] = _table()


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, and where each value came from (`origins`, by full name)."""

    broker: BrokerConfig
    worker: WorkerConfig
    client: ClientConfig
    origins: Mapping[str, str]


def load(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    user_directory: Path | None = None,
) -> Config:
    """Resolve every key once: flag > environment > ./zfabric.toml > user file > default.

    `flags` maps full names (`broker.port`) to text or values, None for "not given" (see
    `flags_of`). The other arguments replace the process's environment, working directory and user
    configuration directory. Raises ConfigError: an unknown key (naming the nearest known one and
    its origin), a value of the wrong type or out of range, or a file that cannot be read.
    """
    values: dict[str, tuple[Any, str]] = {k: (key.default, "default") for k, key in KEYS.items()}
    for layer in (
        _from_file((user_directory or _user_directory()) / USER_FILE_NAME),
        _from_file((directory or Path.cwd()) / FILE_NAME),
        _from_environment(os.environ if environ is None else environ),
        _from_flags(flags or {}),
    ):
        values |= layer
        # The stores exclude each other, so choosing one overrides the other from a lower layer.
        if layer.keys() & {"broker.data", "broker.memory"} == {"broker.data"}:
            values["broker.memory"] = (False, layer["broker.data"][1])
        elif values["broker.memory"][0] and "broker.data" not in layer and "broker.memory" in layer:
            values["broker.data"] = (None, layer["broker.memory"][1])
    sections = {
        section: {name: values[f"{section}.{name}"][0] for name in _names(section)}
        for section in SECTIONS
    }
    return Config(
        BrokerConfig(**sections["broker"]),
        WorkerConfig(**sections["worker"]),
        ClientConfig(**sections["client"]),
        types.MappingProxyType({name: origin for name, (_, origin) in values.items()}),
    )


def add_flags(
    parser: argparse._ActionsContainer, section: str, names: Iterable[str] | None = None
) -> None:
    """Give `parser` the flags of a section (or of `names` in it); `load` parses their text."""
    import argparse

    for name in names or _names(section):
        key = KEYS[f"{section}.{name}"]
        text = key.help + ("" if key.default is None else f" (default: {key.text(key.default)})")
        if key.kind is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(key.flag, dest=key.dest, action=action, default=None, help=text)
        else:
            parser.add_argument(
                key.flag, dest=key.dest, choices=key.choices or None, default=None, help=text,
                metavar=None if key.choices else key.metavar,
            )  # fmt: skip


def flags_of(namespace: argparse.Namespace) -> dict[str, object]:
    """The flags given on the command line, as `load` takes them."""
    given = vars(namespace)
    return {name: given[k.dest] for name, k in KEYS.items() if given.get(k.dest) is not None}


def _following(port: int, step: int, given: int | None) -> int:
    if given is not None:
        return given
    return port + step if port else 0


def _names(section: str) -> list[str]:
    return [row.name for row in dataclasses.fields(SECTIONS[section])]


def _check_section(section: str, config: object) -> None:
    """Check every field of a section built directly, by the rules that `load` applies."""
    for name in _names(section):
        key = KEYS[f"{section}.{name}"]
        value = getattr(config, name)
        if value is None and key.optional:
            continue
        if isinstance(value, str) and key.kind is not str:
            raise ConfigError(f"{key.full_name} must be {key.expectation}, not {value!r}")
        key.value_of(value, "as given", typed=True)


def _user_directory() -> Path:
    import platformdirs

    return Path(platformdirs.user_config_dir("zfabric", appauthor=False))


def _unknown(what: str, origin: str, known: Iterable[str], shown: str) -> ConfigError:
    near = difflib.get_close_matches(what, list(known), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "; see zfabric config show"
    return ConfigError(f"unknown {shown} {what!r} in {origin}{hint}")


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    """The keys of a TOML file by full name; an absent file has none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it is nested too deep") from None
    found = {}
    for section, table in document.items():
        if not isinstance(table, dict) and section not in SECTIONS:
            raise _unknown(section, str(path), KEYS, "key")
        if section not in SECTIONS:
            raise _unknown(section, str(path), SECTIONS, "section")
        if not isinstance(table, dict):
            raise ConfigError(f"[{section}] in {path} must be a section of keys, not {table!r}")
        for name, raw in table.items():
            if f"{section}.{name}" not in KEYS:
                raise _unknown(f"{section}.{name}", str(path), KEYS, "key")
            value = KEYS[f"{section}.{name}"].value_of(raw, str(path), typed=True)
            found[f"{section}.{name}"] = (value, str(path))
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """The keys set by `ZFABRIC_*` variables."""
    known = {key.env_name: name for name, key in KEYS.items()}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in known:
            raise _unknown(variable, "the environment", known, "variable")
        if text:
            origin = f"env {variable}"
            found[known[variable]] = (KEYS[known[variable]].value_of(text, origin), origin)
    return found


def _from_flags(flags: Mapping[str, object]) -> dict[str, tuple[Any, str]]:
    """The keys given on the command line (or by the SDK's caller)."""
    found = {}
    for name, raw in flags.items():
        if name not in KEYS:
            raise _unknown(name, "the flags", KEYS, "key")
        if raw is not None:
            origin = f"flag {KEYS[name].flag}"
            found[name] = (KEYS[name].value_of(raw, origin), origin)
    return found
