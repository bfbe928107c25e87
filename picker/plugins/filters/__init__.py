"""Filters, which narrow the candidates of a profile (`Filter`)."""
