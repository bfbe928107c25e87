"""Kubernetes: the client of an API server, the objects of a pool, and leader election by a Lease.

`client` implements `api` with `credentials`. `reflector` follows objects into an `object_map`;
`objects` and `pods` decode them, `pool_view` and `reconcile` turn them into endpoints and rules,
and `discovery` runs it all. `elector` decides on leadership, `lease` makes its requests.
"""
