"""The gateway's part of the protocol, spoken by the suite: ext_proc streams and health checks."""
