"""Errors that a user can act on, said in one sentence."""


class FleetError(Exception):
    """The message of this error is all that is printed."""

    status = 1


class UsageError(FleetError):
    """A contradictory command line; nothing has been started."""

    status = 2
