"""`pointsman simulate` and `fit`: fleets in virtual time, made of the picker's director and of the
workers' schedulers and caches. Nothing here opens a socket, reads a real clock or starts a thread.

`virtual_fleet` is a picker with workers, `simulation` puts the load of `fleet.bench` on it.
`living_worker` is exact, `fast_worker` approximate; `virtual_kv` moves KV between them,
`virtual_time` is their clock, `latency` has their speeds. `command` runs and reports, in
`processes`; `scenarios` has loads; `fit` finds a speed that matches a run of the bench.
"""
