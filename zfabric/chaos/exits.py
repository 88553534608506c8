"""A producer whose process is gone the moment submit() has come back."""

from __future__ import annotations

import json
import os
import sys

from zfabric.chaos.lines import TRY_S
from zfabric.client import Client
from zfabric.errors import TooManyConnections, TooManyHandshakes
from zfabric.results import Item
from zfabric.shapes import Shape

# Its exit code where a limit of the broker's kept it out; its output says which.
KEPT_OUT = 9


def main() -> None:
    """Submit one item and vanish, without a word to the broker."""
    told = json.loads(sys.argv[2])
    # What it does not acknowledge stays with the broker, even a result that comes before its end.
    try:
        client = Client(
            told["address"], name=told["name"], timeout_s=TRY_S,
            on_results=lambda arrivals, seq: None, key=told["key"],
        )  # fmt: skip
    except (TooManyConnections, TooManyHandshakes) as error:
        sys.stdout.write(str(error))
        sys.exit(KEPT_OUT)
    client.submit(Item(Shape.of(told["model"], "prefix 0"), b"the last will", 7), timeout=30.0)
    os._exit(0)


if __name__ == "__main__":
    main()
