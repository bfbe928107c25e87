"""Errors that a user can act on, each stated in one sentence."""


class FleetError(Exception):
    """An error of which only the message is printed."""

    status = 1


class UsageError(FleetError):
    """A contradictory command line; nothing has been started."""

    status = 2
