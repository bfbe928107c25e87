"""Shared parts of all programs that know nothing of requests, endpoints or models.

`flags` reads command lines, `series` counts and writes metrics pages, `http` sends requests off
the hot path, `forwarding` has the parts of HTTP proxies, `backoff` spaces retries, `durations`
reads and writes spans of time. Domain code of any program does not belong here, and nothing here
imports a program.
"""
