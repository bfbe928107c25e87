"""How full the pool is (`SaturationDetector`)."""
