"""The Envoy in front of the fleet; our own proxies are in `fleet.proxy`.

`settings` are the values that `bootstrap` turns into a document, with `listener`, `clusters`,
`local_replies` and `proto` for its parts; `identity` adds `tenants`. `binary` finds the program,
`admin` reads and controls a running one, by the requests of `probe`.
"""
