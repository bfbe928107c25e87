"""Session bindings: they live while used, die unused, and there are never too many."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from picker.framework.session_bindings import MAX_SESSION_ID, SessionBindings


def test_a_binding_lives_as_long_as_it_is_used() -> None:
    """The time to live counts from the last use, and its end is exact."""
    bindings = SessionBindings(ttl_seconds=300, sweep_seconds=10)
    bindings.bind("s", "default/a", 0.0)
    assert bindings.endpoint("s", 300.0) == "default/a"
    assert bindings.endpoint("s", 300.5) is None
    bindings.bind("s", "default/b", 301.0)
    bindings.bind("s", "default/b", 500.0)
    assert bindings.endpoint("s", 800.0) == "default/b"
    assert bindings.endpoint("other", 800.0) is None


def test_expired_bindings_are_swept_at_the_interval() -> None:
    """They take memory until then, but are never answered with."""
    bindings = SessionBindings(ttl_seconds=5, sweep_seconds=10)
    bindings.bind("s", "default/a", 0.0)
    assert bindings.endpoint("s", 6.0) is None
    assert len(bindings) == 1
    bindings.bind("t", "default/a", 10.0)
    assert len(bindings) == 1
    assert bindings.endpoint("t", 10.0) == "default/a"


def test_time_never_goes_back() -> None:
    """A request that waited long does not revive what is over, nor age what is new."""
    bindings = SessionBindings(ttl_seconds=5, sweep_seconds=1)
    bindings.bind("late", "default/a", 100.0)
    assert bindings.endpoint("late", 50.0) == "default/a"
    bindings.bind("early", "default/b", 50.0)
    assert bindings.endpoint("early", 105.0) == "default/b"
    assert bindings.endpoint("early", 105.1) is None


def test_the_least_recently_used_session_makes_room() -> None:
    """Use is binding; there are never more than the limit."""
    bindings = SessionBindings(ttl_seconds=300, sweep_seconds=10, max_bindings=2)
    bindings.bind("a", "default/x", 0.0)
    bindings.bind("b", "default/x", 1.0)
    bindings.bind("a", "default/x", 2.0)
    bindings.bind("c", "default/x", 3.0)
    kept = [s for s in ("a", "b", "c") if bindings.endpoint(s, 3.0) is not None]
    assert kept == ["a", "c"]


def test_long_ids_take_no_more_memory_than_short_ones() -> None:
    """They are told apart all the same."""
    bindings = SessionBindings(ttl_seconds=300, sweep_seconds=10)
    for last in ("a", "b"):
        bindings.bind("x" * 60_000 + last, f"default/{last}", 0.0)
    assert bindings.endpoint("x" * 60_000 + "b", 0.0) == "default/b"
    assert bindings.endpoint("x" * 60_000 + "a", 0.0) == "default/a"
    assert max(map(len, bindings._bindings)) <= MAX_SESSION_ID


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["bind", "ask"]),
            st.sampled_from("abcdef"),
            st.floats(min_value=0, max_value=100),
        ),
        max_size=60,
    )
)
def test_it_answers_like_a_plain_map_with_ages(steps: list[tuple[str, str, float]]) -> None:
    """Against a model without order, sweeps or a limit that is reached."""
    bindings = SessionBindings(ttl_seconds=10, sweep_seconds=7)
    model: dict[str, tuple[str, float]] = {}
    now = 0.0
    for index, (action, session, at) in enumerate(steps):
        now = max(now, at)
        if action == "bind":
            bindings.bind(session, f"e{index}", at)
            model[session] = (f"e{index}", now)
        known = model.get(session)
        expected = known[0] if known and now - known[1] <= 10 else None
        assert bindings.endpoint(session, at) == expected
        bindings.check_integrity()


@settings(deadline=None, max_examples=60)
@given(st.permutations([("x", 1), ("y", 1), ("y", 2), ("x", 3), ("z", 3), ("a", 2)]))
def test_replicas_that_hear_the_same_bindings_end_with_the_same_one(
    order: list[tuple[str, int]],
) -> None:
    """In whatever order: the most moves, then the least key."""
    bindings = SessionBindings(ttl_seconds=10, sweep_seconds=7)
    for endpoint, moves in order:
        bindings.bound_elsewhere("s", endpoint, moves, 1.0, 5.0)
        bindings.check_integrity()
    assert bindings.endpoint("s", 5.0) == "x"


def test_bindings_of_replicas_that_are_too_old_do_not_count() -> None:
    """And one's own are told with the number of moves, those of others are not told on."""
    bindings = SessionBindings(ttl_seconds=10, sweep_seconds=7)
    told: list[tuple[str, str, int]] = []
    bindings.tell(lambda *binding: told.append(binding))
    bindings.bound_elsewhere("old", "x", 1, 10.5, 5.0)
    bindings.bound_elsewhere("s", "x", 4, 1.0, 5.0)
    for endpoint in ("x", "y", "y"):
        bindings.bind("s", endpoint, 6.0)
    assert bindings.endpoint("old", 5.0) is None
    assert told == [("s", "x", 4), ("s", "y", 5), ("s", "y", 5)]
