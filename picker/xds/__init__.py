"""The shelf of Envoy's endpoint discovery service (EDS), for proxies of the picker's pools.

`port` is what the picker loads (`picker.app.shelves`); the core imports nothing of this room.
`feed` keeps the cache equal to the pool, `state` decides without I/O what to send to a client and
when, `server` carries that over gRPC calls, and `wire` alone knows Envoy's messages.
"""
