"""HTTP and TCP proxies of our own, each on asyncio; Envoy and its bootstrap are in `fleet.envoy`.

`front` resumes streams, `sidecar` runs both legs of a disaggregated request; they share
`forward`. `relay` forwards TCP connections from one fixed address.
"""
