"""Drafters that run on the device, beside the target: a draft model, or a trained head.

How many drafts a step makes is decided in `engine.lengths`, whether they stand in `ops.rejection`.
"""
