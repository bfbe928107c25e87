"""What scripts/gen-protos writes."""
