"""The guard of the port: host names and tokens."""

import pytest

from picker.admin.guarding import HostCheck
from picker.admin.loopback import is_loopback
from tests.support.picker.admin_scene import Scene
from tests.support.picker.pools_port import asked

LOOPBACK, OPEN = ("127.0.0.1",), ("0.0.0.0",)
OURS = ("localhost", "LOCALHOST:9090", "127.0.0.1:1", "[::1]:9090")
FOREIGN = (
    *(None, "", "evil.example", "evil.example:9090", "127.0.0.1.evil.example"),
    *("localhost.evil.example", "127.0.0.1:9090:9090", "127.0.0.1@evil.example"),
    *("[::1].evil.example", "10.0.0.7:9090", "[::1", "localhost/", "2130706433"),
)


@pytest.mark.parametrize(
    ("wanted", "addresses", "headers", "is_allowed"),
    [
        # With any port, since tunnels use another.
        ("127.0.0.1", LOOPBACK, OURS, True),
        ("::1", ("::1",), OURS, True),
        ("127.0.0.1", LOOPBACK, FOREIGN, False),
        # The name of the flag is the operator's choice.
        ("Picker.internal", LOOPBACK, ("picker.internal:9090",), True),
        ("Picker.internal", LOOPBACK, ("other.internal",), False),
        # If other machines can reach the port, the picker does not know its names.
        ("0.0.0.0", OPEN, ("picker.cluster.example",), True),
        ("0.0.0.0", ("10.0.0.7",), ("picker.cluster.example",), True),
        ("0.0.0.0", ("127.0.0.1", "10.0.0.7"), ("picker.cluster.example",), True),
    ],
)
def test_a_loopback_address_allows_only_its_own_names(
    wanted: str, addresses: tuple[str, ...], headers: tuple[str | None, ...], is_allowed: bool
) -> None:
    check = HostCheck()
    check.bound(wanted, addresses)
    assert {header: check.allows(header) for header in headers} == dict.fromkeys(
        headers, is_allowed
    )


def test_loopback_is_127_8_and_1() -> None:
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
    checked: list[str] = []

    async def authorize(token: str, path: str) -> tuple[int, str] | None:
        checked.append(path)
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
    assert set(checked) <= {"/metrics", "/endpoints", "/"}
