"""A gRPC server on HTTP/2 frames of our own: ports, TLS, connections, calls and the health service.

It serves any methods by their paths and is independent of their meaning: no ext_proc, discovery or
pool belongs here. `http2` is the protocol without I/O.
"""
