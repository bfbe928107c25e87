"""What replicas of one picker tell each other."""
