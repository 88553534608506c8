"""The dispatcher's state machine on a real directory, with a broker that dies now and then."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.disk import DiskBench
from tests.harness import FakeWorker
from tests.test_dispatcher_machine import FabricMachine


class StorageMachine(FabricMachine):
    """Everything that the other machine does, and crashes."""

    @initialize(
        policy=st.sampled_from(["lanes", "lanes", "shape"]),
        packing=st.sampled_from(["tight", "strict", "group", "group"]),
        lanes=st.sampled_from([1, 3, 2_048]),
        ragged=st.booleans(),
        attempts=st.sampled_from([1, 3]),
    )
    def begin(self, policy: str, packing: str, lanes: int, ragged: bool, attempts: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="zfabric-test-"))
        self.bench = DiskBench(
            self.root,
            durability="os",
            policy=policy,
            packing=packing,
            lanes=lanes,
            attempts_max=attempts,
            max_items=300,
            producer_items_max=250,
        )
        self.ragged = ragged
        self.producers = [self.bench.producer("a"), self.bench.producer("b")]
        self.workers: dict[str, FakeWorker] = {}
        self.gone: list[FakeWorker] = []
        self.accepted: list[set[int]] = [set(), set()]

    @rule(
        workers_live_on=st.booleans(),
        policy=st.sampled_from(["lanes", "shape"]),
        packing=st.sampled_from(["tight", "strict", "group"]),
        lanes=st.sampled_from([1, 3, 2_048]),
    )
    def broker_is_killed(
        self, workers_live_on: bool, policy: str, packing: str, lanes: int
    ) -> None:
        assert isinstance(self.bench, DiskBench)
        # The next one may be started with other options.
        changed = {"policy": policy, "packing": packing, "lanes": lanes}
        self.bench.config = replace(self.bench.config, **changed)
        self.bench.crash()
        assert not self.bench.found.damaged
        assert not self.bench.found.torn_bytes
        for producer in self.producers:
            producer.hello()
            self.bench.settle()
            producer.last = producer.upto
        for worker in list(self.workers.values()):
            if workers_live_on:
                worker.hello(model="other" if worker.name == "gpu2" else "m", ragged=self.ragged)
                worker.heartbeat()
            else:
                worker.batches.clear()
                del self.workers[worker.name]
        self.bench.settle()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "root"):
            self.bench.backing.close()
            shutil.rmtree(self.root)


StorageMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MACHINE_EXAMPLES", "25")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStorage = StorageMachine.TestCase
