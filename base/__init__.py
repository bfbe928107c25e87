"""The parts that all programs share; they know nothing of requests, endpoints or models.

`flags` reads command lines, `series` counts and writes metrics pages, `http` sends requests off the
hot path, `forwarding` has the parts of HTTP proxies, `backoff` spaces retries, `durations` reads
and writes spans of time, `response_bodies` names the modes of `--response-bodies`. No program's
domain code belongs here, and nothing here imports a program.
"""
