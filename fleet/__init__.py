"""Everything on one machine: the `pointsman` command and the fleet it starts.

The rooms are `run` (processes), `commands`, `proxy`, `envoy`, `doctor`, `bench` and `sim`. Beside
them are only modules that several commands share: their errors, their command lines, their
HTTP client, what a running picker reports, and picker configurations by name.
"""
