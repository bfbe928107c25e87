"""Requests, and an executor whose answers show what it read."""

from collections.abc import Callable, Sequence

import pytest

from tests.support.worker.paged_executor import PagedExecutor, next_token
from worker.engine.messages import AddRequest
from worker.types import SamplingParams


@pytest.fixture
def paged_executor() -> type[PagedExecutor]:
    return PagedExecutor


@pytest.fixture
def follow() -> Callable[..., int]:
    return next_token


@pytest.fixture
def make_request() -> Callable[..., AddRequest]:
    def make(
        request_id: str,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        branches: Sequence[str] = (),
        **params: object,
    ) -> AddRequest:
        sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        return AddRequest(
            request_id, list(prompt), sampling, 0.0, priority, cache_salt, list(branches)
        )

    return make
