"""The server's half of HTTP/2 as far as gRPC needs it: bytes in, calls of methods out. No I/O."""
