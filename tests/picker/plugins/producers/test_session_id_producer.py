"""session-id-producer: a header or a cookie names the session."""

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes, session_id_key
from picker.framework.interfaces import DataProducer, ProducesData
from tests.support.picker.plugin_scenes import configured, request_for


@pytest.mark.parametrize(
    ("parameters", "headers", "expected"),
    [
        ({"headerName": "X-Session"}, {"x-session": " abc "}, "abc"),
        ({"headerName": "x-session"}, {"x-session": ""}, None),
        ({"headerName": "x-session"}, {"x-session": "  "}, None),
        ({"headerName": "x-session"}, {"x-other": "abc"}, None),
        ({"headerName": "x-session"}, {"cookie": "x-session=abc"}, None),
        ({"cookieName": "sid"}, {"cookie": "sid=abc"}, "abc"),
        ({"cookieName": "sid"}, {"cookie": "a=b; sid=abc; sid=second"}, "abc"),
        ({"cookieName": "sid"}, {"cookie": 'sid="quoted value"'}, "quoted value"),
        ({"cookieName": "sid"}, {"cookie": "sid=a=b"}, "a=b"),
        ({"cookieName": "sid"}, {"cookie": "SID=abc"}, None),
        ({"cookieName": "sid"}, {"cookie": "xsid=abc;sid"}, None),
        ({"cookieName": "sid"}, {"cookie": "sid="}, None),
        ({"cookieName": "sid"}, {"cookie": 'sid="'}, '"'),
        ({"cookieName": "sid"}, {"cookie": ";;=;sid = abc ;"}, "abc"),
        ({"cookieName": "sid"}, {}, None),
        ({"cookieName": "sid"}, {"sid": "abc"}, None),
    ],
)
def test_the_session_is_read_from_its_one_source(
    parameters: dict[str, str], headers: dict[str, str], expected: str | None
) -> None:
    producer = configured("session-id-producer", parameters, "mine")
    assert isinstance(producer, DataProducer)
    assert isinstance(producer, ProducesData)
    assert producer.produces == (session_id_key("mine"),)
    request, attributes = replace(request_for(), headers=headers), Attributes()
    assert producer.produce(request, [], attributes) is request
    assert attributes.get(session_id_key("mine")) == expected
