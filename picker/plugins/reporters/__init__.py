"""Report to client and proxy what a response cost and where it came from."""
