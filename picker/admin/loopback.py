"""The test for loopback addresses; separate, so that flags need not import aiohttp."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a numeric address, or a name without a port, is the loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
