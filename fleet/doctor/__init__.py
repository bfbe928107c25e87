"""`pointsman doctor`: gatherers that look, checks that judge what was seen, one report."""
