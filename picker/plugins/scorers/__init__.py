"""Scorers, which rate the candidates of a profile (`Scorer`)."""
