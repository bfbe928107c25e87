"""The names and tokens that the port answers to."""

from __future__ import annotations

import pytest

from picker.admin.guarding import HostCheck
from picker.admin.loopback import is_loopback
from tests.support.picker.admin_scene import Scene
from tests.support.picker.pools_port import asked


@pytest.mark.parametrize("header", ["localhost", "LOCALHOST:9090", "127.0.0.1:1", "[::1]:9090"])
@pytest.mark.parametrize("bound", ["127.0.0.1", "::1"])
def test_names_of_this_machine_are_fine_on_a_loopback_address(header: str, bound: str) -> None:
    """With a port or without one, for tunnels use another."""
    check = HostCheck()
    check.bound(bound, [bound])
    assert check.allows(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "evil.example",
        "evil.example:9090",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.1:9090:9090",
        "127.0.0.1@evil.example",
        "[::1].evil.example",
        "10.0.0.7:9090",
        "[::1",
        "localhost/",
        "2130706433",
    ],
)
def test_other_names_are_refused_on_a_loopback_address(header: str | None) -> None:
    """A name that somebody lets point here is not ours, nor is one that only looks like it."""
    check = HostCheck()
    check.bound("127.0.0.1", ["127.0.0.1"])
    assert not check.allows(header)


def test_the_name_that_was_bound_is_fine() -> None:
    """Whatever it is, it was the operator's choice."""
    check = HostCheck()
    check.bound("Picker.internal", ["127.0.0.1"])
    assert check.allows("picker.internal:9090")
    assert not check.allows("other.internal")


@pytest.mark.parametrize("bound", [["0.0.0.0"], ["10.0.0.7"], ["127.0.0.1", "10.0.0.7"]])
def test_every_name_is_fine_where_others_can_reach_the_port(bound: list[str]) -> None:
    """Nobody here knows what they call it."""
    check = HostCheck()
    check.bound("0.0.0.0", bound)
    assert check.allows("picker.cluster.example")


def test_loopback_is_more_than_one_address() -> None:
    """All of 127/8 and ::1, but no other."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "::", "0.0.0.0", "", "localhost.example")))


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
    judged: list[str] = []

    async def authorize(token: str, path: str) -> tuple[int, str] | None:
        judged.append(path)
        if token == "lost":
            return 503, "away"
        if token == "bad":
            return 401, "who?"
        return None if path == "/metrics" else (403, "no")

    server = Scene().server
    server.protect(authorize)
    port = await server.start("127.0.0.1", 0)
    headers = {} if header is None else {"Authorization": header}
    try:
        answer = await asked(f"http://127.0.0.1:{port}", path, **headers)
    finally:
        await server.stop()
    assert answer.status == status
    assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    assert answer.body
    assert set(judged) <= {"/metrics", "/endpoints", "/"}
