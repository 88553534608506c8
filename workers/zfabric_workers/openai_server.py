"""The engine `openai`: any OpenAI-compatible server over HTTP (vLLM, SGLang, llama.cpp, TGI).

Decides what the driver of its requests is told: address, key, how many at once. The API key comes
from a file or from the environment, never from an option, and is never logged. The server need not
be there when the worker starts; what cannot be reached is tried again, and nothing is charged for
it. Times are seconds, counts tokens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from zfabric.engine import Batch, CacheStats, Result, Room
from zfabric.errors import ConfigError
from zfabric_workers import check_options, need_packages, option, parse_options
from zfabric_workers.cachecounts import CacheCounts, Counters, disagreement
from zfabric_workers.httpdriver import Driver, Manner
from zfabric_workers.inflight import LIMIT_MAX, Limit

# How often the sums over answers are compared with the server's own counters.
CROSS_CHECK_S = 60.0
_REPORTED = {"auto": None, "yes": True, "no": False}


@dataclass(kw_only=True, eq=False)
class OpenAIEngine:
    """A server that somebody else runs. Raises ConfigError for options that cannot be used."""

    # It batches raggedly: equal lengths buy nothing, the order of prefixes does.
    pads: ClassVar[bool] = False
    # Items and tokens of a batch where nobody says otherwise: several times the requests that are
    # in flight, since places stay empty while the last items of a batch are under way.
    suits: ClassVar[tuple[int, int]] = (256, 262_144)

    url: str = option("http://127.0.0.1:8000", "address of the server, with or without /v1")
    served_model: str = option("", "model name that the server knows, if it is another one")
    concurrency: int = option(0, "requests in flight at once; 0 finds out", minimum=0)
    timeout_s: float = option(600.0, "seconds in which one request must be answered", minimum=0.001)
    tries: int = option(4, "times that a request is sent when the server fails at it", minimum=1)
    backoff_s: float = option(0.25, "seconds before the second try, then doubled", minimum=0)
    api_key_file: str = option("", "file that holds the API key")
    api_key_env: str = option("OPENAI_API_KEY", "environment variable that holds the API key")
    cached_tokens: str = option(
        "auto", "whether answers tell cached tokens, 0 being left out: auto, yes or no"
    )
    metrics: bool = option(True, "compare with the counters at /metrics, where there are any")

    _place: str = field(init=False, repr=False, default="")
    _driver: Driver = field(init=False, repr=False)
    _counts: CacheCounts = field(init=False, repr=False)
    _baseline: Counters | None = field(init=False, repr=False, default=None)
    _checked_s: float = field(init=False, repr=False, default=0.0)
    _said: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        check_options(self)
        self._check_url()
        if self.concurrency > LIMIT_MAX:
            raise ConfigError(f"engine option concurrency must be at most {LIMIT_MAX}")
        if self.cached_tokens not in _REPORTED:
            raise ConfigError(f"engine option cached_tokens must be one of {', '.join(_REPORTED)}")
        need_packages("openai", ("aiohttp",), "openai")
        # Read once more in load(); what is wrong with it is said before anything starts.
        key = read_api_key(self.api_key_file, self.api_key_env)
        if key is not None and "@" in urlsplit(self.url).netloc:
            raise ConfigError(
                "engine option url holds a user, and there is an API key too: only one can be "
                "sent. Take the user out of the address, or the key away (--opt api_key_env=)"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> OpenAIEngine:
        """An engine from a command line's texts. Raises ConfigError."""
        return cls(**parse_options(cls, options))

    def _check_url(self) -> None:
        """Raises ConfigError, which never holds the address: a password may be in it."""
        example = "give one like http://127.0.0.1:8000"
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine option url must begin with http:// or https://: {example}")
        try:
            parts = urlsplit(self.url)
            named = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ConfigError(f"engine option url is no address ({error}): {example}") from None
        if not named:
            raise ConfigError(f"engine option url names no server: {example}")
        if parts.query or parts.fragment or not self.url.isprintable() or " " in self.url:
            raise ConfigError(f"engine option url holds more than an address: {example}")

    def load(self) -> None:
        """Read the key, and see what can be learnt of the server. Raises ConfigError."""
        manner = Manner(
            url=self.url,
            timeout_s=self.timeout_s,
            tries=self.tries,
            backoff_s=self.backoff_s,
            api_key=read_api_key(self.api_key_file, self.api_key_env),
            served_model=self.served_model or None,
        )
        self._place = manner.place
        limit = Limit(self.concurrency or None)
        self._counts = CacheCounts(reported=_REPORTED[self.cached_tokens])
        self._driver = Driver(manner, limit, self._counts)
        self._baseline = self._driver.counters() if self.metrics else None
        self._checked_s = time.monotonic()
        if not self.concurrency and (slots := self._driver.slots_total()) is not None:
            limit.settle(slots)

    def run(self, batch: Batch) -> Iterator[tuple[int, Result] | Room]:
        """Send every item; results as they come. See `Driver.run`."""
        yield from self._driver.run(batch)
        if time.monotonic() - self._checked_s >= CROSS_CHECK_S:
            self._cross_check()

    def cache_stats(self) -> CacheStats | None:
        """Sums of what the answers tell; None until one has told cached tokens."""
        return self._counts.stats()

    def close(self) -> None:
        """Compare a last time, and let go of the connections."""
        self._cross_check()
        self._driver.close()

    def _cross_check(self) -> None:
        self._checked_s = time.monotonic()
        stats = self._counts.stats()
        if self._baseline is None or stats is None:
            return
        now = self._driver.counters()
        text = None if now is None else disagreement(stats, now.since(self._baseline))
        if text is not None and not self._said:
            self._said = True
            sys.stderr.write(f"zfabric: {self._place}: {text}\n")


def read_api_key(path: str, variable: str) -> str | None:
    """The key in the file, else in the environment; None where there is none.

    Raises ConfigError, which never holds the key.
    """
    if not path:
        key = os.environ.get(variable, "").strip() if variable else ""
    else:
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the API key in {path}: {type(error).__name__}"
            ) from None
        if not key:
            raise ConfigError(f"the file {path} holds no API key")
    if not key.isascii() or not key.isprintable():
        raise ConfigError("the API key holds characters that no header can carry")
    return key or None
