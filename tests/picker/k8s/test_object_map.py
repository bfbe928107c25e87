"""Records of objects: identity, malformed objects, and changes of the view."""

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.k8s.object_map import MalformedObjectError, Metadata, ObjectMap, metadata_of
from tests.depth import examples


def raw(name: str, value: Any = 1, uid: str = "u", namespace: str = "default") -> msgspec.Raw:
    metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": "5"}
    return msgspec.Raw(msgspec.json.encode({"metadata": metadata, "value": value}))


def decode(given_raw: msgspec.Raw) -> int | None:
    value = msgspec.json.decode(given_raw)["value"]
    if value == 13:
        raise MalformedObjectError("unlucky", keep_last_good=False)
    if not isinstance(value, int):
        raise MalformedObjectError(f"no number: {value}")
    return value if value >= 0 else None


def put(objects: ObjectMap[int], name: str, value: Any = 1, uid: str = "u") -> bool:
    given_raw = raw(name, value, uid)
    metadata = metadata_of(given_raw)
    return objects.put(metadata, given_raw)


def settle(objects: ObjectMap[int], *given_raws: msgspec.Raw) -> bool:
    return objects.replace([objects.read(one) for one in given_raws])


@pytest.fixture
def objects() -> ObjectMap[int]:
    return ObjectMap(decode, "things")


def shown(objects: ObjectMap[int]) -> dict[str, int]:
    return {name: value for (_, name), value in objects.view.items()}


def test_a_view_never_changes(objects: ObjectMap[int]) -> None:
    put(objects, "a", 1)
    before = objects.view
    assert put(objects, "a", 2)
    assert before == {("default", "a"): 1}
    assert objects.view == {("default", "a"): 2}
    with pytest.raises(TypeError):
        before[("default", "b")] = 3  # type: ignore[index]


def test_the_same_record_is_no_change(objects: ObjectMap[int]) -> None:
    put(objects, "a", 1)
    before = objects.view
    assert not put(objects, "a", 1)
    assert not settle(objects, raw("a", 1))
    assert objects.view is before


def test_another_object_of_the_name_is_a_change(objects: ObjectMap[int]) -> None:
    put(objects, "a", 1, uid="u1")
    assert put(objects, "a", 1, uid="u2")
    assert settle(objects, raw("a", 1, uid="u3"))


def test_the_deletion_of_an_older_object_removes_nothing(objects: ObjectMap[int]) -> None:
    put(objects, "a", 1, uid="new")
    assert not objects.remove(Metadata("a", "default", "old", "9"))
    assert shown(objects) == {"a": 1}
    assert objects.remove(Metadata("a", "default", "new", "9"))
    assert not objects.remove(Metadata("a", "default", "new", "9"))


def test_a_list_replaces_all_objects(objects: ObjectMap[int]) -> None:
    for name in "cab":
        put(objects, name)
    assert settle(objects, raw("b"), raw("d"), raw("c"))
    assert [name for _, name in objects.view] == ["c", "b", "d"]


def test_an_object_without_a_record_is_known_but_not_shown(objects: ObjectMap[int]) -> None:
    assert not put(objects, "a", -1)
    assert not put(objects, "a", -2)
    assert put(objects, "a", 1)
    assert put(objects, "a", -1)
    assert shown(objects) == {}


def test_a_malformed_object_keeps_its_last_good_record(objects: ObjectMap[int]) -> None:
    put(objects, "a", 1)
    assert not put(objects, "a", "x")
    assert not settle(objects, raw("a", "x"))
    assert shown(objects) == {"a": 1}
    assert objects.malformed == {("default", "a"): "no number: x"}
    assert put(objects, "a", "x", uid="other")
    assert shown(objects) == {}


def test_a_malformed_object_may_lose_its_last_good_record(objects: ObjectMap[int]) -> None:
    put(objects, "a", 1)
    assert put(objects, "a", 13)
    assert shown(objects) == {}
    assert put(objects, "a", 2)
    assert objects.malformed == {}


def test_an_error_is_reported_once(
    objects: ObjectMap[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for value in ("x", "x", "y", 1, "y"):
            put(objects, "a", value)
    assert [one.args[1:] for one in caplog.records if isinstance(one.args, tuple)] == [
        ("default/a", "no number: x"),
        ("default/a", "no number: y"),
        ("default/a", "no number: y"),
    ]


@pytest.mark.parametrize("error", [KeyError("spec"), TypeError("x"), msgspec.DecodeError("y")])
def test_a_decoder_that_fails_is_a_malformed_object(error: Exception) -> None:
    def failing(_: msgspec.Raw) -> int | None:
        raise error

    objects: ObjectMap[int] = ObjectMap(failing, "things")
    assert not put(objects, "a")
    assert list(objects.malformed) == [("default", "a")]
    objects.remove(Metadata("a", "default", "u", "9"))
    assert objects.malformed == {}


@pytest.mark.parametrize("text", [b"{}", b"[]", b"null", b'{"metadata":3}', b'{"metadata":{}}'])
def test_a_nameless_object_in_a_list_is_left_out(objects: ObjectMap[int], text: bytes) -> None:
    assert settle(objects, msgspec.Raw(text), raw("a"))
    assert shown(objects) == {"a": 1}


@pytest.mark.parametrize("text", [b"{}", b"null", b'{"metadata":{"name":"\xff"}}'])
def test_an_unreadable_list_removes_nothing(objects: ObjectMap[int], text: bytes) -> None:
    """A missing object may be the unreadable one; the next complete list decides."""
    settle(objects, raw("a"), raw("b"))
    assert not settle(objects, msgspec.Raw(text), msgspec.Raw(text))
    assert shown(objects) == {"a": 1, "b": 1}
    settle(objects, msgspec.Raw(text), raw("b", 2), raw("c"))
    assert shown(objects) == {"a": 1, "b": 2, "c": 1}
    settle(objects, raw("b"))
    assert shown(objects) == {"b": 1}


@pytest.mark.parametrize(
    "text", [b'{"metadata":{"name":"\xff"}}', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_bytes_that_no_server_sends_have_no_metadata(text: bytes) -> None:
    assert metadata_of(msgspec.Raw(text)) is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "remove", "list"]),
        st.sampled_from("abc"),
        st.integers(-1, 3),
        st.sampled_from(["u", "v"]),
    ),
    max_size=30,
)


@examples(150)
@given(EVENTS)
def test_the_map_equals_a_plain_dictionary(events: list[tuple[str, str, int, str]]) -> None:
    objects: ObjectMap[int] = ObjectMap(decode, "things")
    model: dict[str, tuple[str, int]] = {}
    for how, name, value, uid in events:
        before = {key: one for key, one in model.items() if one[1] >= 0}
        if how == "put":
            changed = put(objects, name, value, uid)
            model[name] = (uid, value)
        elif how == "remove":
            changed = objects.remove(Metadata(name, "default", uid, "9"))
            if name in model and model[name][0] == uid:
                del model[name]
        else:
            changed = settle(objects, raw(name, value, uid))
            model = {name: (uid, value)}
        after = {key: one for key, one in model.items() if one[1] >= 0}
        assert shown(objects) == {key: value for key, (_, value) in after.items()}
        assert changed is (before != after)
