"""The asynchronous gate in front of the pure core of flow control."""
