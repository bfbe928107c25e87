"""Narrow the candidates of a profile (`Filter`)."""
