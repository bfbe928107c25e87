"""Endpoints files and subset hints, whatever is written in them."""

from ipaddress import ip_address

import yaml
from hypothesis import strategies as st

from picker.config.pool_file import pool_contents
from picker.requestcontrol.candidates import LoadedCandidates, candidates_for
from picker.types import Candidate, Endpoint
from tests.fuzz.conftest import ForSeconds

ADDRESSES = st.one_of(
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda address: address.exploded.upper()),
    st.sampled_from(
        [
            *("10.0.0.1", "10.0.0.2", "::1", "fd00::a", "0:0:0:0:0:0:0:1", "::ffff:10.0.0.1"),
            *("010.0.0.1", "10.0.0", "10.0.0.1.", "fe80::1%lo", "0.0.0.0", "localhost", "", "٣"),
        ]
    ),
    st.text(max_size=8),
)
PORTS = st.one_of(
    st.sampled_from(["8000", "8001", "0", "65536", "08000", "٣", "+1", "", "80 ", "1e3"]),
    st.integers(-1, 70000).map(str),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), ADDRESSES, PORTS, st.text(max_size=6)
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.one_of(st.sampled_from(["a", "b", "a/b"]), SCALARS),
        "namespace": st.one_of(st.sampled_from(["default", "n"]), SCALARS),
        "address": st.one_of(ADDRESSES, SCALARS),
        "port": st.one_of(PORTS, st.integers(0, 70000), SCALARS),
        "labels": st.one_of(
            st.dictionaries(
                st.sampled_from(["metricsAddress", "metricsPort", "role"]),
                st.one_of(ADDRESSES, PORTS),
            ),
            SCALARS,
        ),
        "rank": SCALARS,
        "nodeAddress": st.one_of(ADDRESSES, SCALARS),
        "surprise": SCALARS,
    },
)


def is_sound(endpoint: Endpoint) -> bool:
    host, _, port = endpoint.host_port.rpartition(":")
    ip_address(host.removeprefix("[").removesuffix("]"))
    return (
        str(ip_address(endpoint.address)) == endpoint.address
        and 1 <= int(port) <= 65535
        and endpoint.key.count("/") == 1
        and endpoint.key.isprintable() == (endpoint.namespace + endpoint.name).isprintable()
        and endpoint.rank_index >= 0
        and not set(endpoint.host_port) & set(", \t\r\n%")
    )


def test_any_entries_give_sound_endpoints(for_seconds: ForSeconds) -> None:
    def check(entries: list[object]) -> None:
        content = yaml.safe_dump({"endpoints": entries}).encode()
        found = pool_contents(content, "f", "p")
        assert len(found.endpoints) + found.num_skipped == len(entries)
        assert all(map(is_sound, found.endpoints))
        assert len({endpoint.key for endpoint in found.endpoints}) == len(found.endpoints)
        assert all(len(problem) < 300 for problem in found.skipped)

    for_seconds(st.lists(st.one_of(ENTRIES, SCALARS), max_size=6), check)


POOL = tuple(
    Candidate(Endpoint(f"w{index}", address, port))
    for index, (address, port) in enumerate(
        [("10.0.0.1", 8000), ("10.0.0.1", 8001), ("10.0.0.2", 8000), ("::1", 8000), ("fd00::a", 1)]
    )
)
HINTS = st.one_of(
    ADDRESSES,
    st.tuples(ADDRESSES, PORTS).map(":".join),
    st.tuples(ADDRESSES, PORTS).map(lambda pair: f"[{pair[0]}]:{pair[1]}"),
    st.sampled_from(["[", "]", ":", "[]", "[]:", "[[::1]]:8000", "::1]:8000", "[10.0.0.1]"]),
)


def meant(entry: str) -> set[str]:
    return {
        candidate.endpoint.name
        for candidate in POOL
        if entry.strip() in (candidate.endpoint.address, candidate.endpoint.host_port)
    }


def test_a_subset_hint_never_leaves_the_pool(for_seconds: ForSeconds) -> None:
    def check(hint: list[str]) -> None:
        found = candidates_for(POOL, hint, {}, LoadedCandidates())
        names = [candidate.endpoint.name for candidate in found]
        assert names == [one.endpoint.name for one in POOL if one.endpoint.name in names]
        assert set(names) >= set().union(*map(meant, hint))
        separately = [candidates_for(POOL, [entry], {}, LoadedCandidates()) for entry in hint]
        assert set(names) == {one.endpoint.name for part in separately for one in part}

    for_seconds(st.lists(HINTS, max_size=5), check)
