"""Whether a server still tells what changes, and if not, why, in words that say what to do.

Pure: `now` is an argument everywhere, in seconds of a clock that never goes back.
"""

from __future__ import annotations

from picker.k8s.api import ApiError, Resource, Selection, SilentError, UnreachableError

UNAUTHORIZED = 401
FORBIDDEN = 403
NOT_FOUND = 404


class Contact:
    """What is known of the way to a server, for one selection of one resource.

    A watch that was silent is not trusted because a new one opens: whatever swallows the stream
    may let its beginning pass. Then only something heard on a watch is proof.
    """

    def __init__(self, resource: Resource, selection: Selection) -> None:
        self._resource = resource
        self._selection = selection
        self._heard_at: float | None = None
        self._failing_since: float | None = None
        self._error: ApiError | UnreachableError | None = None

    def heard(self, now: float) -> bool:
        """An event, a bookmark, or a watch that came to its proper end. Whether that is news."""
        self._heard_at = now
        if self._error is None:
            return False
        self._error = self._failing_since = None
        return True

    def answered(self, now: float) -> bool:
        """A list, or a watch that opens: proof too, but not after silence. Whether it is news."""
        return not isinstance(self._error, SilentError) and self.heard(now)

    def failed(self, now: float, error: ApiError | UnreachableError) -> bool:
        """A request or a watch came to this. Whether it is news: well before, or another trouble
        than before.
        """
        before = self._error
        if self._failing_since is None:
            self._failing_since = now
        if not isinstance(before, SilentError) or isinstance(error, ApiError):
            self._error = error
        return before is None or _trouble(before) != _trouble(error)

    def silent_seconds(self, now: float) -> float | None:
        """Since something was last heard; None when nothing ever was."""
        return None if self._heard_at is None else now - self._heard_at

    def problem(self, now: float) -> str | None:
        """Why what is known may be old, with the fix where there is one; None while all is well."""
        if self._error is None or self._failing_since is None:
            return None
        what = f"{self._resource.qualified} in namespace {self._selection.namespace!r}"
        since = f"for {now - self._failing_since:.0f} s"
        return f"{what}: {self._why(self._error)} ({since}; the last known state is in use)"

    def _why(self, error: ApiError | UnreachableError) -> str:
        if isinstance(error, UnreachableError):
            return f"the API server cannot be followed: {error}"
        if error.status == FORBIDDEN:
            group = self._resource.group or '""'
            return (
                f"the API server forbids it; grant the verbs list and watch on "
                f"{self._resource.plural} (API group {group}) in namespace "
                f"{self._selection.namespace!r} to the picker's service account: {error.message}"
            )
        if error.status == UNAUTHORIZED:
            return f"the API server does not know who asks; renew the credentials: {error.message}"
        if error.status == NOT_FOUND:
            return (
                f"the API server knows no {self._resource.plural} of "
                f"{self._resource.api_version}; install its CustomResourceDefinition (see crds/)"
            )
        return f"the API server refuses: {error}"


def _trouble(error: ApiError | UnreachableError) -> int:
    """What makes two failures the same one to people."""
    return error.status if isinstance(error, ApiError) else 0
