"""Chaos: a real fabric of processes, a load, a fault, and a judge of what came out.

`stage` starts the fabric, `load` submits and collects, `proxy` cuts links, `peers` are clients of
our own that misbehave, `scenarios` are the faults, `judge` says what broke, `play` runs one.
"""
