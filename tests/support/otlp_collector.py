"""A collector of OpenTelemetry spans, by OTLP as JSON over HTTP."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Spans = list[dict[str, Any]]


@contextmanager
def otlp_collector() -> Iterator[tuple[str, Spans]]:
    """Yield the address, and the spans so far, each with its `service`. It collects in a thread,
    because programs wait for the collector as they stop.
    """
    spans: Spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in json.loads(body)["resourceSpans"]:
                names = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
                service = names["service.name"]["stringValue"]
                for scope in resource["scopeSpans"]:
                    spans.extend({**span, "service": service} for span in scope["spans"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_request(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tree_of(spans: Spans) -> dict[str | None, list[dict[str, Any]]]:
    """Return the children of each span id; those of None are roots, or have an unknown parent."""
    ids = {span["spanId"] for span in spans}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda one: int(one["startTimeUnixNano"])):
        parent = span.get("parentSpanId") or None
        children.setdefault(parent if parent in ids else None, []).append(span)
    return children
