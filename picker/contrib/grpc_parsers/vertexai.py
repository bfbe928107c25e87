"""vertexai-parser: Vertex AI's gRPC PredictionService with OpenAI's JSON.

ChatCompletions, RawPredict and StreamRawPredict: a request is one uncompressed gRPC frame with
`http_body=2{data=2}`, a body of `chat/completions` for the first, of `responses` for the others. It
is forwarded unchanged, so its model cannot be replaced. Other methods and their responses are not
read.

A response is a stream of frames of `HttpBody{data=2}`; their concatenated data are OpenAI's JSON or
its events.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from picker.contrib.grpc_parsers._frames import FrameSplitter, only_message
from picker.contrib.grpc_parsers._generated import grpc_bodies_pb2 as pb
from picker.errors import RefusedError
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._usage import USAGE, JsonUsage, SseUsage, openai_usage
from picker.plugins.parsers.http_parsers import OpenAIParser
from picker.types import Api, ParsedBody, Usage

_OPENAI_PATHS = {
    "/ChatCompletions": "/chat/completions",
    "/RawPredict": "/responses",
    "/StreamRawPredict": "/responses",
}
_SPACE = b" \t\r\n"


class VertexAIParser:
    claims: tuple[str, ...] = (
        "PredictionService/ChatCompletions",
        "PredictionService/StreamRawPredict",
        "PredictionService/RawPredict",
    )

    def __init__(self) -> None:
        self._openai = OpenAIParser()

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        method = path.rstrip("/").rpartition("/")[2]
        openai_path = _OPENAI_PATHS.get(f"/{method}")
        if openai_path is None:
            return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
        try:
            request = only_message(pb.PredictRequest, body)
            parsed = self._openai.parse(openai_path, headers, request.http_body.data)
        except (ValueError, RefusedError):
            return ParsedBody(Api.RAW, can_rewrite=False)
        return replace(parsed, can_rewrite=False)

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return _HttpBodyUsage()


@dataclass(slots=True)
class _HttpBodyUsage:
    """Reads a stream of frames; the first data decide whether to read JSON or events."""

    _frames: FrameSplitter = field(default_factory=FrameSplitter)
    _inner: JsonUsage | SseUsage | None = None

    @property
    def usage(self) -> Usage | None:
        return self._inner.usage if self._inner is not None else None

    def feed(self, data: bytes, is_last: bool) -> None:
        for message in self._frames.feed(data):
            try:
                content = pb.HttpBody.FromString(message).data
            except DecodeError:
                continue
            self._take(content)
        if is_last and self._inner is not None:
            self._inner.feed(b"", True)

    def _take(self, data: bytes) -> None:
        if self._inner is None:
            begin = data.lstrip(_SPACE)
            if not begin:
                return
            is_json = begin.startswith(b"{")
            self._inner = (JsonUsage if is_json else SseUsage)(openai_usage, USAGE)
        self._inner.feed(data, False)


PLUGINS = (PluginType("vertexai-parser", VertexAIParser),)
