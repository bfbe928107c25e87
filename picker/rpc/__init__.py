"""A gRPC server on our own HTTP/2 implementation, for any methods, named by their paths.

`http2` is the protocol without I/O. No ext_proc, discovery or pool belongs here.
"""
