"""Parsers, which read the bodies of requests to some paths (`Parser`)."""
