"""The engine `llamacpp`: a GGUF file, served by llama.cpp's own server inside this process.

Decides how that server is set up so that the order of work, and nothing else, decides what its
cache hits: every slot keeps the prefix of its last request, so an item is pinned to a slot and one
slot is the default; the host's prompt cache (cache_ram), which would hide the order, is off. The
server listens on loopback, on a free port, and takes a key that is made anew each time. Counts are
tokens; hits are what the server itself reports with each answer.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from zfabric.engine import Batch, CacheStats, Result, Room
from zfabric.errors import ConfigError, FabricError
from zfabric_workers import check_options, need_packages, option, parse_options
from zfabric_workers.cachecounts import CacheCounts, disagreement
from zfabric_workers.httpdriver import Driver, Manner
from zfabric_workers.inflight import Limit
from zfabric_workers.openai_server import read_api_key

HOST = "127.0.0.1"
MAGIC = b"GGUF"
SLOTS_MAX = 64
PORT_MAX = 65_535
KEY_BYTES = 16
POOLINGS = ("", "MEAN", "CLS", "LAST")


@dataclass(kw_only=True, eq=False)
class LlamaCppEngine:
    """llama.cpp with one model. Raises ConfigError for options that cannot be used."""

    # It batches raggedly: equal lengths buy nothing, the order of prefixes does.
    pads: ClassVar[bool] = False

    model_path: str = option("", "the GGUF file (needed)")
    context_tokens: int = option(0, "context of each slot in tokens; 0 is the model's", minimum=0)
    slots: int = option(1, "requests at once; each slot has a cache of its own", minimum=1)
    threads: int = option(0, "processor threads; 0 leaves it to llama.cpp", minimum=0)
    gpu_layers: int = option(-1, "layers on the GPU; -1 leaves it to llama.cpp", minimum=-1)
    answer_tokens: int = option(
        2_048, "most tokens of an answer that sets no max_tokens; 0: the whole context", minimum=0
    )
    embeddings: bool = option(False, "serve /v1/embeddings, and nothing else")
    pooling: str = option("", "how tokens become a vector: mean, cls or last; empty: the model's")
    timeout_s: float = option(600.0, "seconds in which one request must be answered", minimum=0.001)
    port: int = option(0, "port of the server, on loopback; 0 is any free one", minimum=0)
    api_key_file: str = option("", "file with the server's key; without it nobody else knows it")

    _server: Any = field(init=False, repr=False, default=None)
    _driver: Driver = field(init=False, repr=False)
    _counts: CacheCounts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.model_path:
            raise ConfigError("the engine llamacpp needs a model: --model-path FILE.gguf")
        _check_magic(self.model_path)
        if self.pooling.upper() not in POOLINGS:
            raise ConfigError("engine option pooling must be mean, cls, last or empty")
        if self.slots > SLOTS_MAX:
            raise ConfigError(f"engine option slots must be at most {SLOTS_MAX}")
        if self.port > PORT_MAX:
            raise ConfigError(f"engine option port must be at most {PORT_MAX}, not {self.port}")
        # Read once more in load(); what is wrong with it is said before anything starts.
        read_api_key(self.api_key_file, "")
        need_packages("llamacpp", ("xllamacpp", "aiohttp"), "llamacpp")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> LlamaCppEngine:
        """An engine from a command line's texts. Raises ConfigError."""
        return cls(**parse_options(cls, options))

    def load(self) -> None:
        """Start the server.

        Raises ConfigError without xllamacpp, or where no other try would help: a damaged file, a
        port in use. FabricError for anything else.
        """
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError(
                "the engine llamacpp needs xllamacpp: pip install 'zfabric[llamacpp]'"
            ) from error
        key = read_api_key(self.api_key_file, "") or secrets.token_hex(KEY_BYTES)
        _check_port(self.port)
        try:
            self._server = xllamacpp.Server(self._parameters(xllamacpp, key))
        except Exception as error:
            damage = _damage(self.model_path)
            if damage is not None:
                raise ConfigError(f"{self.model_path} is damaged: {damage}") from error
            raise FabricError(
                f"llama.cpp cannot load {self.model_path}; its own lines above say why. If it "
                "lacks memory, try a smaller --opt context_tokens="
            ) from error
        manner = Manner(
            url=self._server.listening_address,
            timeout_s=self.timeout_s,
            api_key=key,
            slots=self.slots,
        )
        self._counts = CacheCounts(reported=True)
        self._driver = Driver(manner, Limit(self.slots), self._counts)

    def run(self, batch: Batch) -> Iterator[tuple[int, Result] | Room]:
        """Send every item, in order; results as they come."""
        return self._driver.run(batch)

    def cache_stats(self) -> CacheStats | None:
        """Sums of what the server tells with each answer."""
        return None if self.embeddings else self._counts.stats()

    def close(self) -> None:
        """Compare the sums with the server's counters, and let go of the connections."""
        stats, counters = self.cache_stats(), self._driver.counters()
        if stats is not None and counters is not None:
            text = disagreement(stats, counters)
            sys.stderr.write(
                f"zfabric: llama.cpp counted {counters.cached_tokens:,} of "
                f"{counters.asked_tokens:,} prompt tokens cached{'' if text is None else '; '}"
                f"{text or ''}\n"
            )
        self._driver.close()

    def _parameters(self, xllamacpp: Any, key: str) -> Any:
        chosen = xllamacpp.CommonParams()
        chosen.model.path = self.model_path
        chosen.n_parallel = self.slots
        # One context is divided among the slots; 0 makes it one model context for all of them.
        chosen.n_ctx = self.context_tokens * self.slots
        chosen.cache_ram_mib = 0
        chosen.cache_idle_slots = False
        chosen.kv_unified = False
        # A model that never ends would keep its slot for a whole context; 0 would mean no answer.
        chosen.n_predict = self.answer_tokens or -1
        chosen.hostnames = [HOST]
        chosen.port = self.port
        chosen.api_keys = [key]
        chosen.endpoint_metrics = True
        # Warnings and errors; at 3 it writes several lines for each request.
        chosen.verbosity = 2
        chosen.ui = False
        chosen.warmup = False
        chosen.fit_params = False
        chosen.embedding = self.embeddings
        if self.pooling:
            kinds = xllamacpp.llama_pooling_type
            name = f"LLAMA_POOLING_TYPE_{self.pooling.upper()}"
            chosen.pooling_type = getattr(kinds, name)
        chosen.n_gpu_layers = self.gpu_layers
        if self.threads:
            chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = self.threads
        return chosen


def _check_magic(path: str) -> None:
    """Raises ConfigError for what is no GGUF file, at the cost of four bytes."""
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        with Path(path).open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if magic != MAGIC:
        raise ConfigError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")


def _check_port(port: int) -> None:
    """Raises ConfigError for a port that another process has; 0 is any free one."""
    with socket.socket() as probe:
        # A server that has just ended leaves connections behind, and is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be had ({error.strerror}): give each worker another one "
                "(--opt port=), or none, and a free one is taken"
            ) from None


def _damage(path: str) -> str | None:
    """Why no try would ever load the file; None where the file is whole."""
    try:
        import gguf
    except ImportError:
        return None
    try:
        tensors = gguf.GGUFReader(path).tensors
    except OSError:
        return None
    except Exception as error:  # noqa: BLE001 - its reader runs into whatever the bytes are
        return f"it ends too early, or its header holds nonsense ({type(error).__name__})"
    return None if tensors else "it holds no tensors"
