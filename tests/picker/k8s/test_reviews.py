"""Reviews of tokens and their permissions by an API server, and the cache of their results."""

from typing import Any, cast

import pytest

from picker.k8s.api import ApiError, KubernetesApi, UnreachableError
from picker.k8s.reviews import (
    ACCESS_REVIEWS,
    ALLOWED_SECONDS,
    MAX_REMEMBERED,
    MAX_TOKEN_LETTERS,
    REFUSED_SECONDS,
    TOKEN_REVIEWS,
    AccessReviews,
    Authorization,
    ReviewError,
)


class _Reviewer:
    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None

    async def send(self, _: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((path, document))
        if self.error is not None:
            raise self.error
        spec = document["spec"]
        if path == TOKEN_REVIEWS:
            is_known = spec["token"] == "good"
            user = {"username": "prometheus", "groups": ["scrapers"]} if is_known else {}
            return {"status": {"authenticated": is_known, "user": user}}
        assert (path, spec["user"], spec["groups"]) == (ACCESS_REVIEWS, "prometheus", ["scrapers"])
        wanted = spec["nonResourceAttributes"]
        return {"status": {"allowed": wanted == {"path": "/metrics", "verb": "get"}}}


class _Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.api = _Reviewer()
        self.reviews = AccessReviews(cast("KubernetesApi", self.api), lambda: self.now)


@pytest.fixture
def scene() -> _Scene:
    return _Scene()


async def test_the_cluster_decides(scene: _Scene) -> None:
    assert await scene.reviews.authorize("good", "/metrics") is Authorization.ALLOWED
    assert await scene.reviews.authorize("good", "/decisions/") is Authorization.FORBIDDEN
    assert await scene.reviews.authorize("bad", "/metrics") is Authorization.UNKNOWN


async def test_answers_are_remembered_for_a_while(scene: _Scene) -> None:
    for token, seconds, requests in (("good", ALLOWED_SECONDS, 2), ("bad", REFUSED_SECONDS, 1)):
        scene.api.asked.clear()
        await scene.reviews.authorize(token, "/metrics")
        scene.now += seconds - 0.1
        await scene.reviews.authorize(token, "/metrics")
        assert len(scene.api.asked) == requests
        scene.now += 0.2
        await scene.reviews.authorize(token, "/metrics")
        assert len(scene.api.asked) == 2 * requests
    scene.api.asked.clear()
    too_long = "x" * (MAX_TOKEN_LETTERS + 1)
    assert await scene.reviews.authorize(too_long, "/metrics") is Authorization.UNKNOWN
    assert await scene.reviews.authorize("", "/metrics") is Authorization.UNKNOWN
    assert scene.api.asked == []
    await scene.reviews.authorize(too_long[1:], "/metrics")
    assert len(scene.api.asked) == 1


async def test_the_cache_of_answers_is_bounded(scene: _Scene) -> None:
    await scene.reviews.authorize("good", "/metrics")
    for number in range(MAX_REMEMBERED):
        await scene.reviews.authorize(f"guess {number}", "/metrics")
    scene.api.asked.clear()
    assert await scene.reviews.authorize("good", "/metrics") is Authorization.ALLOWED
    assert len(scene.api.asked) == 2
    await scene.reviews.authorize("guess 1", "/metrics")
    assert len(scene.api.asked) == 2
    await scene.reviews.authorize("guess 0", "/metrics")
    assert len(scene.api.asked) == 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ApiError(403, "Forbidden", "no"), "tokenreviews"),
        (ApiError(500, "", "oh"), "refuses to say"),
        (UnreachableError("connection refused"), "connection refused"),
    ],
)
async def test_a_cluster_that_fails_to_answer_denies_access(
    scene: _Scene, error: Exception, said: str
) -> None:
    scene.api.error = error
    with pytest.raises(ReviewError, match=said):
        await scene.reviews.authorize("good", "/metrics")
    scene.api.error = None
    assert await scene.reviews.authorize("good", "/metrics") is Authorization.ALLOWED
