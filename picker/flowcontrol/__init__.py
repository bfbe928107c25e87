"""Flow control: bands, flows, caps, saturation and eviction, decided without I/O or a clock.

`core` decides, `shell.controller` waits and owns the timers; nothing else in here may.
"""
