"""The proxy's report of the origin: metadata first, then the configured attributes."""

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Struct

from picker.extproc.machine.messages import ResponseHeaders
from picker.extproc.wire import decode

ATTRIBUTES = "envoy.filters.http.ext_proc"


def head(attributes: dict[str, Any] | None, served: str | None = None) -> ResponseHeaders:
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    if attributes is not None:
        fields = Struct()
        fields.update(attributes)
        message.attributes[ATTRIBUTES].CopyFrom(fields)
    if served is not None:
        metadata = Struct()
        metadata.update({"x-gateway-destination-endpoint-served": served})
        message.metadata_context.filter_metadata["envoy.lb"].CopyFrom(metadata)
    return decode(message.SerializeToString())


@pytest.mark.parametrize(
    ("attributes", "served", "served_by", "reached_no_endpoint"),
    [
        (None, None, None, False),
        (None, "10.0.0.1:1", "10.0.0.1:1", False),
        ({"upstream.address": "10.0.0.2:1"}, None, "10.0.0.2:1", False),
        ({"upstream.address": "10.0.0.2:1"}, "10.0.0.1:1", "10.0.0.1:1", False),
        (
            {"upstream.address": "10.0.0.2:1", "upstream.request_attempt_count": 2},
            None,
            "10.0.0.2:1",
            False,
        ),
        ({"upstream.request_attempt_count": 1}, None, None, True),
        ({"upstream.address": "", "upstream.request_attempt_count": 1}, None, None, True),
        ({"response.code": 503}, None, None, False),
        ({}, None, None, False),
    ],
)
def test_the_origin_of_the_answer(
    attributes: dict[str, Any] | None,
    served: str | None,
    served_by: str | None,
    reached_no_endpoint: bool,
) -> None:
    event = head(attributes, served)
    assert (event.served_by, event.reached_no_endpoint) == (served_by, reached_no_endpoint)
