"""Flow control: bands, flows, caps, saturation and eviction, decided without I/O or a clock.

`core` decides, `shell.controller` waits and owns the timers; no other module here may do so.
"""
