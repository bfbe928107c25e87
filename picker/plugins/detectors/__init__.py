"""Saturation of the pool (`SaturationDetector`)."""
