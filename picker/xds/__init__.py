"""The shelf of Envoy's endpoint discovery service (EDS), for proxies of the picker's pools.

`port` is what the picker loads (`picker.app.shelves`). `feed` keeps the cache equal to the pool,
`state` decides without I/O what to send, `server` carries that over gRPC, and `wire` alone knows
Envoy's messages.
"""
