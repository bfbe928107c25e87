"""Envoy's endpoint discovery service (EDS) for proxies of the picker's pools.

`feed` keeps the cache equal to the pool, `state` decides what a client is sent and when, `server`
carries that over calls of gRPC, and `wire` alone knows Envoy's messages.
"""
