"""A producer whose process is gone the moment submit() has come back."""

from __future__ import annotations

import json
import os
import sys

from zfabric.client import Client
from zfabric.results import Item
from zfabric.shapes import Shape


def main() -> None:
    """Submit one item and vanish, without a word to the broker."""
    told = json.loads(sys.argv[2])
    # What it does not acknowledge stays with the broker, even a result that comes before its end.
    client = Client(
        told["address"], name=told["name"], on_results=lambda arrivals, seq: None, key=told["key"]
    )
    client.submit(Item(Shape.of(told["model"], "prefix 0"), b"the last will", 7), timeout=30.0)
    os._exit(0)


if __name__ == "__main__":
    main()
