"""The pool's endpoints for the proxy beside the picker: Envoy's endpoint discovery service (EDS).

`feed` keeps `cache` equal to the pool, `sotw` and `delta` decide what one client is told of it and
when, `server` carries that over calls of gRPC, and `wire` alone knows Envoy's messages.
"""
