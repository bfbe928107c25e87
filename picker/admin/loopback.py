"""Which addresses are this machine's own. Flags are read without the rest of this room."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a numeric address or a name, as in a `Host` header without its port, is this machine
    and nothing but.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
