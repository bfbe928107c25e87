"""Producers of findings about a request and its candidates before scheduling (`DataProducer`)."""
