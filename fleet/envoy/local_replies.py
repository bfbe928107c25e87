"""Envoy's own answers (no healthy worker, a timeout, a body too large) in the form of the API that
was called, like the picker's.

The formats are CEL expressions, since Envoy has no table for them. The picker's own answers, and
those below 400, pass unchanged; the status message of a gRPC response stays text.
"""

from collections.abc import Callable, Iterable
from http import HTTPStatus

from fleet.envoy.proto import Json, extension
from fleet.envoy.settings import LOCAL_REPLY_HEADER
from picker.errors import ANSWER_DETAILS, ANTHROPIC_PATHS, GRPC_CONTENT, anthropic_type, openai_type

# The statuses that Envoy and its filters produce; others are typed by their class.
_STATUSES = (401, 403, 404, 408, 413, 426, 429, 431, 502, 503, 504)
_MARK = {"header": {"key": LOCAL_REPLY_HEADER, "value": "envoy"}}
_DETAILS = "response.code_details"
# Envoy's words are for operators: the meaning for a client precedes them. Where a sentence ends
# without a colon, Envoy has no words.
_SENTENCES = (
    (f"{_DETAILS} == 'route_not_found'", "'There is nothing at this path'"),
    (f"{_DETAILS} == 'upgrade_failed'", "'This upgrade is not possible here'"),
    (f"{_DETAILS}.startsWith('ext_proc')", "'The endpoint picker did not answer'"),
    (f"{_DETAILS} == 'missing_host_header'", "'The request has no Host header'"),
    (
        f"{_DETAILS} == 'http1.unexpected_underscore'",
        "'No header may have an underscore in its name: '",
    ),
    (f"{_DETAILS}.startsWith('http')", "'The proxy cannot take this HTTP request: '"),
    (f"{_DETAILS} == 'no_healthy_upstream'", "'No worker can take the request: '"),
    (
        f"{_DETAILS}.startsWith('upstream_reset')",
        "'The worker could not be reached, or broke off before it answered: '",
    ),
    (f"{_DETAILS} == 'local_rate_limited'", "'The tenant has used its requests a minute: '"),
    (f"{_DETAILS} == 'request_payload_too_large'", "'The request body is too large: '"),
    (f"{_DETAILS} == 'stream_idle_timeout'", "'Nothing was received for too long: '"),
    ("response.code == 504", "'The worker did not answer in time: '"),
    ("response.code == 408", "'The request did not arrive in time: '"),
)


def local_reply_config() -> Json:
    untouched = {"text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"}}
    paths = "|".join(ANTHROPIC_PATHS)
    message = f"%CEL({_choice(_SENTENCES)})%%LOCAL_REPLY_BODY%"
    anthropic = {"type": "error", "error": {"type": _types(anthropic_type), "message": message}}
    detail = {"type": _types(openai_type), "param": None, "code": "%RESPONSE_CODE%"}
    openai = {"error": {"message": message, **detail}}
    return {
        "mappers": [
            _mapper(f"response.code < 400 || {_DETAILS} == '{ANSWER_DETAILS}'", untouched),
            _mapper(f"request.headers['content-type'].startsWith('{GRPC_CONTENT}')", untouched),
            _mapper(
                f"request.path.matches('({paths})/?([?].*)?$')", {"json_format": anthropic}, _MARK
            ),
            _mapper("true", {"json_format": openai}, _MARK),
        ]
    }


def _types(type_of: Callable[[int], str]) -> str:
    def quoted(status: int) -> str:
        return f"'{type_of(status)}'"

    ours, theirs = quoted(HTTPStatus.INTERNAL_SERVER_ERROR), quoted(HTTPStatus.BAD_REQUEST)
    known = [
        (f"response.code == {status}", quoted(status))
        for status in _STATUSES
        if quoted(status) != (theirs if status < HTTPStatus.INTERNAL_SERVER_ERROR else ours)
    ]
    return f"%CEL({_choice([*known, ('response.code < 500', theirs)], ours)})%"


def _choice(cases: Iterable[tuple[str, str]], otherwise: str = "''") -> str:
    return "".join(f"{condition} ? {value} : " for condition, value in cases) + otherwise


def _mapper(condition: str, form: Json, *added: Json) -> Json:
    expression = extension(
        "envoy.access_loggers.extension_filters.cel",
        "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
        expression=condition,
    )
    return {
        "filter": {"extension_filter": expression},
        "body_format_override": form,
        "headers_to_add": list(added),
    }
