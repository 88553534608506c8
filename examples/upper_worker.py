"""A worker of your own in one class: it answers every prompt with the prompt in capitals."""

from zfabric import Batch, CacheStats, Contract, Worker
from zfabric.engine import Result


class Upper:
    """An engine: load once, then run batches."""

    def load(self) -> None:
        """Nothing to load."""

    def run(self, batch: Batch) -> list[Result]:
        """One result for each item, in order."""
        return [Result.ok(payload.upper()) for payload in batch.payloads]

    def cache_stats(self) -> CacheStats | None:
        """No prefix cache, so nothing is measured."""
        return None


if __name__ == "__main__":
    contract = Contract(batch_items_max=32, batch_tokens_max=65_536, input_tokens_max=8_192)
    Worker(Upper, model="tiny", contract=contract, name="upper0", engine="upper").run()
