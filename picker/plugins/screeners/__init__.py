"""Narrow the candidates of all profiles (`Screener`)."""
