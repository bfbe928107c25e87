"""Arithmetic on tensors: attention, products, sampling, verification of drafts; each call is pure.

Nothing here knows of models, sequences or requests beyond the values in `worker.types`.
"""
