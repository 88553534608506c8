"""A bench whose store is a real directory, and whose broker can die at any time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tests.harness import Bench
from zfabric.dispatcher import Dispatcher
from zfabric.osfiles import OsFiles
from zfabric.recovery import Recovered, open_backing
from zfabric.restore import restore
from zfabric.store import Store


class DiskBench(Bench):
    """As Bench, on `root`; `crash` forgets everything but the files."""

    def __init__(
        self, root: Path, *, durability: str = "fsync", rebuild: bool = False, **config: Any
    ) -> None:
        self.root = root
        self.durability = durability
        self.rebuild = rebuild
        self.backing: Any = None
        self.found = Recovered()
        self._boots = itertools.count(7)
        super().__init__(**config)

    def files(self) -> OsFiles:
        return OsFiles(self.root)

    def start_broker(self, boot: int) -> None:
        self.backing, self.found = open_backing(
            self.root, self.durability, self.files(), rebuild=self.rebuild
        )
        store = Store(self.backing)
        ports = {"worker_port": 7411, "stats_port": 7412}
        self.dispatcher = Dispatcher(self.config, store, boot, ports)
        restore(self.dispatcher.fabric, self.backing, self.found, self.now)

    def settle(self) -> None:
        """As Bench.settle, with every sync that is wanted."""
        for _ in range(6):
            super().settle()
            if not self.dispatcher.sync_wanted:
                return
            self.backing.sync()
            self.dispatcher.synced()
        super().settle()

    def crash(self) -> None:
        """The process is killed: memory and connections are gone, the files are as written."""
        self.backing.close()
        self.ends.clear()
        self.start_broker(next(self._boots) + 1)
