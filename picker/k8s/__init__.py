"""Kubernetes: the client of an API server, the objects of a pool, and leader election by a Lease.

`api` is the interface, `client` its HTTP implementation, `credentials` its access. `reflector`
follows a selection of objects into an `object_map`; `objects` and `pods` decode them, `pool_view`
and `reconcile` turn them into endpoints and rules, and `discovery` runs it all. `elector` decides
on leadership, `lease` makes its requests. `reviews` checks bearer tokens, `service_addresses` finds
peers. Nothing else in the picker knows Kubernetes objects.
"""
