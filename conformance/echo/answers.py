"""An endpoint's answer: its name and the request that it received."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

SERVED_BY = "x-echo-endpoint"
ECHO = "x-echo"
BODY, STREAM = "body", "stream"  # what that request header may ask for
JSON = "application/json"
_IDLE, _FULL = (0, 0, 0.0), (500, 500, 1.0)
_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="conformance"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="conformance"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="conformance"}} {usage}
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{{model_name="conformance"}} {usage}
"""


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it reached an endpoint."""

    endpoint: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    protocol: str

    def header(self, name: str) -> str | None:
        """The last value of a header, by its lower-cased name."""
        found = [value for key, value in self.headers if key.lower() == name]
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer in one piece."""

    headers: tuple[tuple[str, str], ...]
    body: bytes


def reply_to(received: Received) -> Reply:
    """The body as it came where a header asks for it, else a description of the request."""
    names = ((SERVED_BY, received.endpoint),)
    if received.header(ECHO) == BODY:
        return Reply((*names, ("content-type", JSON)), received.body)
    described = {
        "endpoint": received.endpoint,
        "protocol": received.protocol,
        "method": received.method,
        "path": received.path,
        "headers": [list(pair) for pair in received.headers],
        "bytes": len(received.body),
        "sha256": hashlib.sha256(received.body).hexdigest(),
    }
    return Reply((*names, ("content-type", JSON)), json.dumps(described).encode())


def metrics_page(is_full: bool) -> str:
    """A metrics page in vLLM's format, of an idle or an overloaded server."""
    running, waiting, usage = _FULL if is_full else _IDLE
    return _METRICS.format(running=running, waiting=waiting, usage=usage)


def events(count: int, endpoint: str) -> Sequence[bytes]:
    """The events of a stream; the last is `[DONE]`."""
    named = [f'data: {{"index": {at}, "endpoint": "{endpoint}"}}\n\n' for at in range(count)]
    return [event.encode() for event in (*named, "data: [DONE]\n\n")]
