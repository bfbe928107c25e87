"""The bottom of the picker's metrics: series, label caps, and one family of series for each room.

Imports nothing of the picker but errors. Rooms report to their family; `telemetry` watches
decisions.
"""
