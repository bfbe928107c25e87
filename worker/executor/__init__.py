"""The part of the worker that owns the device and runs steps; it knows nothing of requests."""
