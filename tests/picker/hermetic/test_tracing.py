"""Spans of requests (case H1), as a collector receives them."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.picker.ext_proc_stream import completion
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import whole_picker

pytest.importorskip("picker.telemetry.otel")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Spans = list[dict[str, Any]]


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Collect spans in a thread, because the picker waits for the collector as it stops."""
    spans: Spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in json.loads(body)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    spans.extend(scope["spans"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_request(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_request_and_its_decision_are_spans(tmp_path: Path, collected: Spans) -> None:
    async with whole_picker(tmp_path, pods(page()), tracing=True) as picker:
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with picker.stream() as stream:
            said = await stream.ask(completion(), sent)
            options = said[0].request_headers.response.header_mutation.set_headers
            (traceparent,) = [o.header.raw_value for o in options if o.header.key == "traceparent"]
            await stream.respond([b"{}"])
    named = {span["name"]: span for span in collected}
    request, decision = named["gateway.request"], named["gateway.request_orchestration"]
    assert (request["traceId"], request["parentSpanId"]) == (TRACE, PARENT)
    assert decision["parentSpanId"] == request["spanId"]
    assert traceparent.decode() == f"00-{TRACE}-{request['spanId']}-01"
    attributes = {one["key"]: one["value"] for one in decision["attributes"]}
    assert attributes["gen_ai.request.model"] == {"stringValue": "my-model"}
