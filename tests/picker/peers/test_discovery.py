"""Names that resolve to replicas."""

from collections.abc import Sequence

import pytest

from picker.errors import ConfigError
from picker.peers.discovery import MAX_PEERS, NamedPeers, PeerAddress, PeerName, peer_name, resolve


@pytest.mark.parametrize(
    ("text", "default", "name"),
    [
        ("a.b:9", None, PeerName("a.b", 9)),
        ("a.b", 7, PeerName("a.b", 7)),
        ("10.0.0.1:9", 7, PeerName("10.0.0.1", 9)),
        ("[::1]:9", None, PeerName("::1", 9)),
        ("[::1]", 7, PeerName("::1", 7)),
    ],
)
def test_a_peer_is_a_host_and_a_port(text: str, default: int | None, name: PeerName) -> None:
    assert peer_name(text, default) == name


@pytest.mark.parametrize("text", ["", "a", "a:", "a:b", "a:0", "a:70000", ":9", "::1", "a:9:9"])
def test_a_text_that_is_not_a_peer_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"peer|brackets"):
        peer_name(text)


class Names:
    def __init__(self, **known: Sequence[str] | None) -> None:
        self.known = known

    async def resolve(self, host: str) -> Sequence[str]:
        found = self.known[host]
        if found is None:
            raise OSError("no answer")
        return found


async def test_a_name_follows_the_resolver_and_survives_its_failures() -> None:
    names, found = Names(service=["10.0.0.1", "fd00::1"], single=["10.0.0.1"]), []
    wanted = [PeerName("service", 9), PeerName("single", 9)]
    peers = NamedPeers(wanted, lambda addresses: found.append(addresses), "", names.resolve)
    await peers.look()
    names.known["service"] = None
    await peers.look()
    names.known["service"] = []
    await peers.look()
    both = [PeerAddress("10.0.0.1:9", "service"), PeerAddress("[fd00::1]:9", "service")]
    assert found == [both, both, [PeerAddress("10.0.0.1:9", "single")]]


async def test_a_name_resolves_to_a_bounded_number_of_replicas() -> None:
    """The bound is safe, as all certificates must name the given server name."""
    names, found = Names(many=[f"10.0.1.{number}" for number in range(200)]), []
    peers = NamedPeers([PeerName("many", 9)], found.extend, "replicas", names.resolve)
    await peers.look()
    assert len(found) == MAX_PEERS
    assert {one.name for one in found} == {"replicas"}


async def test_an_address_resolves_to_itself() -> None:
    assert await resolve("10.1.2.3") == ["10.1.2.3"]
    assert "127.0.0.1" in await resolve("localhost")


async def test_an_invalid_name_is_logged_like_an_unknown_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[PeerAddress] = []
    names = [PeerName("a..b", 9), PeerName("x" * 64 + ".example", 9), PeerName("10.0.0.1", 9)]
    await NamedPeers(names, found.extend).look()
    assert [one.target for one in found] == ["10.0.0.1:9"]
    assert "'a..b' cannot be resolved" in caplog.text
