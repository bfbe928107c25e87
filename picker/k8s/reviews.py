"""Reviews of requests by an API server (TokenReview and SubjectAccessReview), cached for a while.

The cache holds hashes of tokens only. Refusals are cached as well, so that a scraper with a wrong
token costs the API server little.
"""

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from picker.k8s.api import ApiError, KubernetesApi, UnreachableError

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ALLOWED_SECONDS: Final = 60.0
REFUSED_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 1024  # scrapers are few
MAX_TOKEN_LETTERS: Final = 16 * 1024  # ten times what a cluster issues
_AT_A_TIME: Final = 4


class Authorization(enum.Enum):
    ALLOWED = "allowed"
    UNKNOWN = "unknown token"
    FORBIDDEN = "not allowed to read this"


class ReviewError(Exception):
    """The API server did not answer, or forbids the review; the text names the fix."""


class AccessReviews:
    def __init__(self, api: KubernetesApi, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._known: OrderedDict[tuple[bytes, str], tuple[Authorization, float]] = OrderedDict()
        self._asking = asyncio.Semaphore(_AT_A_TIME)

    async def authorize(self, token: str, path: str) -> Authorization:
        """Decide whether the bearer of `token` may get `path`. Raises `ReviewError`."""
        if not token or len(token) > MAX_TOKEN_LETTERS:
            return Authorization.UNKNOWN
        key = (sha256(token.encode()).digest(), path)
        known = self._known.get(key)
        if known is not None and self._clock() < known[1]:
            return known[0]
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._asking:
                found = await self._ask(token, path)
        except ApiError as error:
            raise ReviewError(_why(error)) from error
        except (UnreachableError, TimeoutError) as error:
            said = str(error) or "no answer in time"
            raise ReviewError(f"the API server cannot be asked who this is: {said}") from error
        seconds = ALLOWED_SECONDS if found is Authorization.ALLOWED else REFUSED_SECONDS
        self._known[key] = (found, self._clock() + seconds)
        self._known.move_to_end(key)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def _ask(self, token: str, path: str) -> Authorization:
        review = _review("authentication.k8s.io/v1", "TokenReview", {"token": token})
        status = _part(await self._api.send("POST", TOKEN_REVIEWS, review), "status")
        user = _part(status, "user")
        if status.get("authenticated") is not True or not user.get("username"):
            return Authorization.UNKNOWN
        spec = {
            "user": user["username"],
            "uid": user.get("uid", ""),
            "groups": user.get("groups", []),
            "extra": user.get("extra", {}),
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        review = _review("authorization.k8s.io/v1", "SubjectAccessReview", spec)
        status = _part(await self._api.send("POST", ACCESS_REVIEWS, review), "status")
        is_allowed = status.get("allowed") is True and status.get("denied") is not True
        return Authorization.ALLOWED if is_allowed else Authorization.FORBIDDEN


def _review(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {}, "spec": spec}


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _why(error: ApiError) -> str:
    if error.status != 403:
        return f"the API server refuses to say who this is: {error}"
    return (
        "the picker may not ask who this is; grant its service account, by a ClusterRole, {verbs: "
        "[create], apiGroups: [authentication.k8s.io], resources: [tokenreviews]} and {verbs: "
        "[create], apiGroups: [authorization.k8s.io], resources: [subjectaccessreviews]}, or give "
        f"--metrics-endpoint-auth=false: {error.message}"
    )
