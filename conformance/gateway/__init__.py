"""The gateway of the suites: a real Envoy set up as the protocol asks."""
