"""Kubernetes: the client of an API server, following its objects, and electing a leader by a Lease.
Objects become values of `picker.pool` here; nothing else in the picker knows how they look.
"""
