"""The worker's `/metrics`: vLLM's series, rendered from a snapshot in tens of microseconds."""
