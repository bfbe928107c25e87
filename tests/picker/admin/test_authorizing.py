"""The HTTP port where it is protected: who gets through, and what the others are told."""

from __future__ import annotations

import aiohttp
import pytest

from picker.admin.pool_face import PoolFace
from picker.admin.server import AdminServer
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/metrics", "Bearer good", 200),
        ("/metrics", "bearer good", 200),
        ("/metrics", None, 401),
        ("/metrics", "Basic good", 401),
        ("/metrics", "Bearer ", 401),
        ("/metrics", "Bearer bad", 401),
        ("/metrics", "Bearer lost", 503),
        ("/endpoints", "Bearer good", 403),
        ("/endpoints", None, 401),
        ("/no/such/page", "Bearer good", 403),
        ("/healthz", None, 200),
        ("/readyz", None, 200),
    ],
)
async def test_only_health_needs_no_token(path: str, header: str | None, status: int) -> None:
    """Everything else is for those whom the cluster lets read it."""
    asked: list[str] = []

    async def authorize(token: str, path: str) -> tuple[int, str] | None:
        asked.append(path)
        if token == "lost":
            return 503, "away"
        if token == "bad":
            return 401, "who?"
        return None if path == "/metrics" else (403, "no")

    server = AdminServer.of_one(
        PoolFace(PickerMetrics(), Datastore(), InflightLoad()), lambda: True
    )
    server.protect(authorize)
    port = await server.start("127.0.0.1", 0)
    headers = {} if header is None else {"Authorization": header}
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"http://127.0.0.1:{port}{path}") as answer,
        ):
            assert answer.status == status
            assert ("WWW-Authenticate" in answer.headers) == (status == 401)
            assert await answer.text()
    finally:
        await server.stop()
    assert set(asked) <= {"/metrics", "/endpoints", "/"}
