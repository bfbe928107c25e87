"""What can go wrong for the person at the terminal, said in one sentence."""

from __future__ import annotations


class FleetError(Exception):
    """Something the user can act on; the message is the whole of what is printed."""

    status = 1


class UsageError(FleetError):
    """A command line that asks for what cannot be; nothing has been started."""

    status = 2
