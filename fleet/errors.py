"""Errors that a user can act on, said in one sentence."""


class FleetError(Exception):
    """An error the user can act on; the message is all that is printed."""

    status = 1


class UsageError(FleetError):
    """A contradictory command line; nothing has been started."""

    status = 2
