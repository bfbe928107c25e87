"""A gRPC server on HTTP/2 frames of our own, for any methods by their paths.

`http2` is the protocol without I/O. No ext_proc, discovery or pool belongs here.
"""
