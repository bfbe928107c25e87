"""Ports for servers that have to be told theirs before they begin.

Below those that systems give to outgoing connections and to whoever asks for any port, so that
nobody else on the machine takes one before its server does.
"""

from __future__ import annotations

from conformance.ports import free_ports

__all__ = ["free_port", "free_ports"]


def free_port() -> int:
    """A port nobody listens on right now."""
    return free_ports(1)[0]
