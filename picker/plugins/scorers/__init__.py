"""Rate the candidates of a profile (`Scorer`)."""
