"""Checkpoints and the models in them: files, configurations, weights, forward passes.

Arithmetic that depends on the device or the batch is in `worker.ops`.
"""
