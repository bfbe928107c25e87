"""Whether a stage of a disaggregated request is worth its profile (`Decider`)."""
