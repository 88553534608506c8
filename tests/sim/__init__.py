"""The whole fabric in one process, driven by one seed; see `world`."""
