"""What can go wrong for the person at the terminal, said in one sentence."""

from __future__ import annotations


class FleetError(Exception):
    """Something the user can act on; the message is the whole of what is printed."""
