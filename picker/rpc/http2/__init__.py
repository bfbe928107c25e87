"""The server side of HTTP/2 for gRPC: bytes in, method calls out. No I/O."""
