"""Where a model of torch runs: the packages it needs, its threads, its device.

Decides what `auto` means (CUDA where there is one) and what is said when what was asked for is not
there. Imports nothing heavy before it is called: an engine's options are checked without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from zfabric.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


def packages(engine: str, names: Sequence[str]) -> list[Any]:
    """torch and the modules `names`, imported, without progress bars of theirs.

    Raises ConfigError, naming the extra, where one of them cannot be imported.
    """
    try:
        found = [importlib.import_module(name) for name in ("torch", *names)]
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
    except ImportError as error:
        missing = error.name or error
        raise ConfigError(
            f"the engine {engine} needs {missing}: pip install 'zfabric[{engine}]'"
        ) from error
    return found


def check_device(device: str) -> None:
    """Raises ConfigError for a name that is none of `DEVICES`."""
    if device not in DEVICES:
        raise ConfigError(f"engine option device must be one of {', '.join(DEVICES)}")


def choose_device(torch: Any, device: str, threads: int) -> str:
    """The device to load a model on; 0 threads leave their number to torch.

    Raises ConfigError where CUDA is asked for and missing.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ConfigError("there is no CUDA device here; use --opt device=cpu")
    if threads:
        torch.set_num_threads(threads)
    return ("cuda" if cuda else "cpu") if device == "auto" else device
