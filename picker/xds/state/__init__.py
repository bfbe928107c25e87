"""The resources of endpoint discovery, and the responses to each client. No I/O."""
