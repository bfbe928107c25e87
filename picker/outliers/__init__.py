"""Outlier ejection: one circuit breaker for each endpoint, and the detector that owns them all.

Pure: no clock, no I/O. The series and log lines about it are in `picker.telemetry`.
"""
