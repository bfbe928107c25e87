"""The part of the worker that owns the device and runs steps: model runner, KV cache, ranks and
drafters.

It receives plain ints (`worker.types`) and knows nothing of requests or of scheduling.
"""
