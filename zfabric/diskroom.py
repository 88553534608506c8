"""Room on the disk: whether anything new may be taken in, and a reserve for what must be written.

Intake stops under the low-water mark, so that running into the end of the disk is the exception;
results need room even then, and the reserve is given up for them. Sizes are bytes, times seconds.
It must never refuse what is already promised.
"""

from __future__ import annotations

from collections.abc import Callable

from zfabric.osfiles import OsFiles

# Free space is looked at this often: more would cost a system call a message.
SPACE_CHECK_S = 0.25
# Enough for the results of what workers hold.
MIN_FREE_BYTES = 64 * 1024 * 1024
RESERVE_BYTES = 16 * 1024 * 1024
RESERVE = "reserve"


class DiskRoom:
    """The limits of one data directory."""

    def __init__(self, files: OsFiles) -> None:
        self._files = files
        self.min_free_bytes = MIN_FREE_BYTES
        self.max_disk_bytes: int | None = None
        # why nothing new may be taken in, as of the last look
        self.reason: str | None = None
        self._checked_s = -SPACE_CHECK_S
        self._path = files.root / RESERVE
        # whether the reserve is held, and whether it is known to have its blocks: a crash may have
        # come before it got them, and a copy of a directory may have left them out
        self.reserved = files.exists(self._path)
        self._filled = False

    def refusal(self, now: float, used_bytes: Callable[[], int]) -> str | None:
        """Why nothing new may be taken in, or None; `used_bytes` says what this store uses."""
        if now < self._checked_s + SPACE_CHECK_S:
            return self.reason
        self._checked_s = now
        free = self._files.free_bytes()
        self.reason = None
        if free < self.min_free_bytes:
            self.reason = f"{free} bytes are free, {self.min_free_bytes} are kept back"
            self.give_up_reserve()
        elif self.max_disk_bytes is not None and used_bytes() >= self.max_disk_bytes:
            self.reason = f"the store uses the {self.max_disk_bytes} bytes that it may"
        elif not self._filled and free >= self.min_free_bytes + RESERVE_BYTES:
            # Keep room for results on a disk that others may fill. It must not be what makes this
            # disk full: it would be given up at the next look, and held again at the one after.
            self._files.reserve(self._path, RESERVE_BYTES)
            self.reserved = self._filled = True
        return self.reason

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are held for results, besides what the store uses."""
        return RESERVE_BYTES if self.reserved else 0

    def give_up_reserve(self) -> bool:
        """Free the reserve; False where there was none."""
        if not self.reserved:
            return False
        self._files.unlink(self._path)
        self.reserved = self._filled = False
        return True
