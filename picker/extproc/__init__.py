"""Envoy's external processing protocol; the state machine of a stream, `machine`, does no I/O."""
