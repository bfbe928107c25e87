"""What is told: sets of resources, their versions, and who hears of a change."""

from __future__ import annotations

from picker.xds.state.cache import Cache, resource_of, version_of


def test_versions_are_those_of_the_content() -> None:
    """The same content has the same version in another picker; names alone do not matter to it."""
    assert resource_of("a", b"x") == resource_of("a", b"x")
    assert resource_of("a", b"x").version != resource_of("a", b"y").version


def test_a_version_of_several_depends_on_names_and_contents_but_not_on_order() -> None:
    """Two sets with one version hold the same."""
    one, two = resource_of("a", b"x"), resource_of("b", b"y")
    assert version_of([one, two]) == version_of([two, one])
    told = [version_of(some) for some in ([], [one], [two], [one, two], [resource_of("b", b"x")])]
    assert len(set(told)) == len(told)


def test_only_changes_are_told_of() -> None:
    """Nothing is known before the first set; the same set again is no news."""
    cache, heard = Cache(), []
    assert cache.current is None

    def listen() -> None:
        heard.append(cache.current.number)

    cache.watch(listen)
    assert cache.publish([])
    assert not cache.publish([])
    assert cache.publish([resource_of("a", b"x")])
    assert not cache.publish([resource_of("a", b"x")])
    assert heard == [1, 2]
    cache.unwatch(listen)
    assert cache.publish([])
    assert heard == [1, 2]
