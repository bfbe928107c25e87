"""Saturation detectors, which measure how full the pool is (`SaturationDetector`)."""
