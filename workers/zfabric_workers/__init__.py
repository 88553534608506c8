"""The engines that `zfabric worker` knows by name, and the options that each takes.

Decides which class a name stands for and what of a command line it accepts. An engine is a
dataclass whose option fields are made with `option()`; its module must be cheap to import (what
is heavy is imported in load()), because its options are checked before its process is started.
Never imports an engine that was not asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from zfabric.engine import Engine, EngineFactory
from zfabric.errors import ConfigError

ENGINES: dict[str, str] = {
    "embed": "zfabric_workers.embed:EmbedEngine",
    "llamacpp": "zfabric_workers.llamacpp:LlamaCppEngine",
    "openai": "zfabric_workers.openai_server:OpenAIEngine",
    "sim": "zfabric_workers.sim:SimEngine",
    "transformers": "zfabric_workers.causal:CausalEngine",
}

_METADATA_KEY = "zfabric_option"
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_EXPECTED: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    bytes: "text",
    str: "text",
}
T = TypeVar("T", bool, int, float, bytes, str)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an engine; its kind is the type of its default."""

    name: str
    default: Any
    help: str
    minimum: float | None

    @property
    def kind(self) -> type:
        return type(self.default)


def option(default: T, help: str, *, minimum: float | None = None) -> T:
    """A dataclass field that is an option of the engine."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: (help, minimum)})


def options_of(engine: type) -> tuple[Option, ...]:
    """Every option of an engine's class, in the order in which it declares them."""
    return tuple(
        Option(field.name, field.default, *field.metadata[_METADATA_KEY])
        for field in dataclasses.fields(engine)
        if _METADATA_KEY in field.metadata
    )


def describe_options(name: str) -> list[tuple[str, str, str]]:
    """(option, default, what it does) of the engine called `name`, for --help."""
    known = options_of(engine_class(name))
    return [(each.name, _shown(each.default), each.help) for each in known]


def parse_options(engine: type, given: Mapping[str, str]) -> dict[str, Any]:
    """`given` as typed keyword arguments; bounds are for `check_options`.

    Raises ConfigError for an unknown option, naming the nearest known one, or a bad value.
    """
    known = {each.name: each for each in options_of(engine)}
    parsed: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            raise ConfigError(f"unknown engine option {name!r}; {_nearest(name, known)}")
        try:
            parsed[name] = _parsed(known[name].kind, text)
        except (ValueError, KeyError):
            expected = _EXPECTED[known[name].kind]
            raise ConfigError(f"engine option {name} must be {expected}, not {text!r}") from None
    return parsed


def check_options(engine: object) -> None:
    """Raise ConfigError if an option of a built engine has the wrong type or is out of bounds."""
    for each in options_of(type(engine)):
        value: Any = getattr(engine, each.name)
        accepted = (int, float) if each.kind is float else each.kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and each.kind is not bool):
            expected = "bytes" if each.kind is bytes else _EXPECTED[each.kind]
            raise ConfigError(f"engine option {each.name} must be {expected}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"engine option {each.name} must be finite, not {value}")
        if isinstance(value, (int, float)) and each.minimum is not None and value < each.minimum:
            raise ConfigError(
                f"engine option {each.name} must be at least {each.minimum:g}, not {value}"
            )


def need_packages(engine: str, packages: Iterable[str], extra: str) -> None:
    """Raise ConfigError, naming the extra, where a package of an engine is missing.

    Only looks for them: importing them here would cost each command seconds.
    """
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        raise ConfigError(
            f"the engine {engine} needs {', '.join(missing)}: pip install 'zfabric[{extra}]'"
        )


def engine_class(name: str) -> Any:
    """The class behind `name`. Raises ConfigError, listing what there is, if there is none."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known are {', '.join(sorted(ENGINES))}")
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def engine_factory(name: str, options: Mapping[str, str]) -> EngineFactory:
    """A picklable factory of the engine `name`; its options are checked here and now.

    Raises ConfigError.
    """
    engine = engine_class(name)
    engine.from_options(options)
    return cast("functools.partial[Engine]", functools.partial(engine.from_options, dict(options)))


def _nearest(name: str, known: Mapping[str, Option]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _parsed(kind: type, text: str) -> Any:
    if kind is bool:
        return _TRUTH[text.strip().lower()]
    if kind is bytes:
        return text.encode()
    return kind(text)


def _shown(default: bool | int | float | bytes | str) -> str:
    if isinstance(default, bytes):
        return default.decode()
    return str(default).lower() if isinstance(default, bool) else str(default)
