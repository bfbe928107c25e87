"""Indexes which endpoint holds which prompt blocks. Pure; sockets are in `picker.kvevents`."""
