"""A gRPC server on HTTP/2 frames of our own: ports, TLS, connections, calls and the health service.

It serves any methods, named by their paths, and knows nothing of what they do: no ext_proc, no
discovery, no pool may be named here. `http2` is the protocol without I/O.
"""
