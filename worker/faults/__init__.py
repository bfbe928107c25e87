"""Faults on purpose, and the switches of the simulator: what is set over `/admin/config` or by
`--sim-*` flags. The API and the engine work without this package and know nothing of it.
"""
