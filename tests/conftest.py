"""What holds for all tests."""

from __future__ import annotations

import signal

# A run in the background of a shell starts with SIGINT ignored, and all that it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
