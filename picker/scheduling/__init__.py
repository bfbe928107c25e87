"""The scheduler: filters, weighted scorers and a picker for each profile. No I/O."""
