"""Sets of resources, their versions, and the notification of changes."""

from picker.xds.state.cache import Cache, resource_of, version_of


def test_a_version_identifies_the_content() -> None:
    assert resource_of("a", b"x") == resource_of("a", b"x")
    assert resource_of("a", b"x").version != resource_of("a", b"y").version


def test_a_version_of_several_depends_on_names_and_contents_only() -> None:
    one, two = resource_of("a", b"x"), resource_of("b", b"y")
    assert version_of([one, two]) == version_of([two, one])
    published = [
        version_of(some) for some in ([], [one], [two], [one, two], [resource_of("b", b"x")])
    ]
    assert len(set(published)) == len(published)


def test_watchers_are_notified_of_changes_only() -> None:
    cache, notified = Cache(), []
    assert cache.current is None

    def listen() -> None:
        notified.append(cache.current.number)

    cache.watch(listen)
    assert cache.publish([])
    assert not cache.publish([])
    assert cache.publish([resource_of("a", b"x")])
    assert not cache.publish([resource_of("a", b"x")])
    assert notified == [1, 2]
    cache.unwatch(listen)
    assert cache.publish([])
    assert notified == [1, 2]


def test_a_published_name_is_no_longer_awaited() -> None:
    cache = Cache(("a", "b", "c"))
    assert cache.current is None
    cache.update(resource_of("a", b"1"))
    assert cache.current.awaited == {"b", "c"}
    cache.publish([resource_of("b", b"1")])
    assert cache.current.awaited == {"c"}
