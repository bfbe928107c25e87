"""The agreement of replicas on one seed."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from picker.peers.seeds import SETTLE_SECONDS, SeedAgreement, fingerprint, seed_of_secret
from tests.depth import examples


def test_all_replicas_follow_one_seed_in_any_order() -> None:
    for order in permutations(range(3)):
        known = [SeedAgreement(index, bytes([index]), 0.0, 100.0 - index) for index in range(3)]
        late = SETTLE_SECONDS + 1.0
        joined = SeedAgreement(9, b"j", late, 0.0)
        members = [*(known[index] for index in order), joined]
        for _ in range(2):
            for one in members:
                for other in members:
                    other.receive(one.offer(late), late)
        assert {one.value for one in members} == {2}


def test_a_configured_seed_is_neither_sent_nor_changed() -> None:
    fixed, drawn = (
        SeedAgreement(5, b"f", 0.0, 0.0, is_configured=True),
        SeedAgreement(6, b"d", 0, 0),
    )
    assert fixed.offer(99.0).value is None
    assert not fixed.receive(drawn.offer(99.0), 99.0)
    assert not drawn.receive(fixed.offer(99.0), 99.0)
    assert (fixed.value, drawn.value) == (5, 6)
    assert not drawn.matches(fixed.offer(99.0))
    assert SeedAgreement(5, b"o", 0.0, 0.0, is_configured=True).matches(fixed.offer(0.0))


def test_a_value_that_does_not_match_its_fingerprint_is_ignored() -> None:
    one, other = SeedAgreement(1, b"a", 0.0, 0.0), SeedAgreement(2, b"b", 0.0, 9.0)
    offered = one.offer(0.0)
    assert not other.receive(type(offered)(7, 1, True, 0, b""), 0.0)
    assert other.value == 2


@examples(50)
@given(st.integers(0, 2**64 - 1))
def test_a_fingerprint_does_not_reveal_the_seed(seed: int) -> None:
    """It has 64 bits, like the seed of a secret."""
    assert fingerprint(seed) != seed
    assert 0 <= fingerprint(seed) < 2**64
    assert 0 <= seed_of_secret(seed.to_bytes(8, "big")) < 2**64
