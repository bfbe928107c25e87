"""Drafters that run on the device, beside the target: a draft model, or a trained head."""
