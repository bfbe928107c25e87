"""Subscribes to the KV-cache events of engines. The pure codec and index are in `picker.prefix`."""
