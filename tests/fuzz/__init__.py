"""Fuzzing: what anybody may send, write or configure, made by `forge` and judged by `targets`."""
