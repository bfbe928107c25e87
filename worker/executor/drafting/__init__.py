"""Drafters that run on the device, beside the target: a draft model, or a trained head.

`engine.lengths` chooses the number of drafts of a step; `ops.rejection` accepts or rejects them.
"""
