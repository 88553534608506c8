"""zfabric: a brokered work fabric for GPU inference.

The names below are the public API. Each is imported when it is first used, so that `import zfabric`
costs nothing and needs no socket library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zfabric.aio import AsyncClient as AsyncClient
    from zfabric.batchoptions import Summary as Summary
    from zfabric.batchrun import run_batch as run_batch
    from zfabric.client import Client as Client
    from zfabric.engine import Batch as Batch
    from zfabric.engine import CacheStats as CacheStats
    from zfabric.engine import Engine as Engine
    from zfabric.errors import Backpressure as Backpressure
    from zfabric.errors import ConfigError as ConfigError
    from zfabric.errors import ConnectError as ConnectError
    from zfabric.errors import FabricError as FabricError
    from zfabric.errors import ItemFailed as ItemFailed
    from zfabric.errors import Lost as Lost
    from zfabric.errors import NameInUse as NameInUse
    from zfabric.errors import NotAllowed as NotAllowed
    from zfabric.errors import ProtocolError as ProtocolError
    from zfabric.errors import Refused as Refused
    from zfabric.errors import TimeoutExpired as TimeoutExpired
    from zfabric.errors import TooManyConnections as TooManyConnections
    from zfabric.errors import TooManyHandshakes as TooManyHandshakes
    from zfabric.errors import VersionMismatch as VersionMismatch
    from zfabric.results import Item as Item
    from zfabric.results import Result as Result
    from zfabric.results import Results as Results
    from zfabric.shapes import Contract as Contract
    from zfabric.shapes import Shape as Shape
    from zfabric.worker import Worker as Worker

__version__ = "0.1.0"

_MODULE_OF = {
    "AsyncClient": "aio",
    "Batch": "engine",
    "CacheStats": "engine",
    "Client": "client",
    "Contract": "shapes",
    "Engine": "engine",
    "Item": "results",
    "Result": "results",
    "Results": "results",
    "Shape": "shapes",
    "Summary": "batchoptions",
    "Worker": "worker",
    "run_batch": "batchrun",
    **dict.fromkeys(
        (
            *("Backpressure", "ConfigError", "ConnectError", "FabricError", "ItemFailed", "Lost"),
            *("NameInUse", "NotAllowed", "ProtocolError", "Refused", "TimeoutExpired"),
            *("TooManyConnections", "TooManyHandshakes", "VersionMismatch"),
        ),
        "errors",
    ),
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zfabric' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zfabric.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
