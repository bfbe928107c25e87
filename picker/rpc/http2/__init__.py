"""The server's half of HTTP/2 for gRPC: bytes in, calls of methods out. No I/O."""
