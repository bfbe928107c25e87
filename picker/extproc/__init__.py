"""Envoy's external processing protocol: the state machine of a stream in `machine`, which does no
I/O, Envoy's messages in `wire`, and `pump`, which runs the machine on a call of gRPC.
"""
