"""zfabric: a brokered work fabric for GPU inference."""

__version__ = "0.1.0"
