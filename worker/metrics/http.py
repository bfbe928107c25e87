"""The `http_*` series, named and bucketed as those of prometheus-fastapi-instrumentator."""

from __future__ import annotations

from worker.metrics.families import Histogram, head_text, label_text

EXCLUDED_HANDLERS = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_MANY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_FEW_BUCKETS = (0.1, 0.5, 1.0)


class HttpMetrics:
    """Owns the counts of HTTP exchanges. Label values are bounded: the caller names routes it has
    ("none" for the rest), unusual methods are one, and statuses are told by their class.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str, str], int] = {}
        self._request_bytes: dict[str, tuple[int, int]] = {}
        self._response_bytes: dict[str, tuple[int, int]] = {}
        self._all = Histogram(
            "http_request_duration_highr_seconds",
            "Latency with many buckets but no API specific labels.",
            _MANY_BUCKETS,
            "",
        )
        self._by_route: dict[tuple[str, str], Histogram] = {}
        self._rendered: bytes | None = None

    def done(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Count one exchange, unless its route is one of `EXCLUDED_HANDLERS`."""
        if handler in EXCLUDED_HANDLERS:
            return
        if method not in _METHODS:
            method = "other"
        key = (handler, f"{status // 100}xx", method)
        self._totals[key] = self._totals.get(key, 0) + 1
        _add(self._request_bytes, handler, request_bytes)
        _add(self._response_bytes, handler, response_bytes)
        self._all.observe(seconds)
        route = (handler, method)
        if route not in self._by_route:
            self._by_route[route] = Histogram(
                "http_request_duration_seconds",
                "",
                _FEW_BUCKETS,
                label_text({"handler": handler, "method": method}),
            )
        self._by_route[route].observe(seconds)
        self._rendered = None

    def render(self) -> bytes:
        """The text of every `http_*` family."""
        if self._rendered is None:
            self._rendered = self._text().encode() + self._all.render() + self._durations()
        return self._rendered

    def _text(self) -> str:
        lines = [
            head_text(
                "http_requests_total",
                "counter",
                "Total number of requests by method, status and handler.",
            )
        ]
        for (handler, status, method), count in self._totals.items():
            labels = label_text({"handler": handler, "method": method, "status": status})
            lines.append(f"http_requests_total{{{labels}}} {count}\n")
        for name, text, sizes in (
            (
                "http_request_size_bytes",
                "Content length of incoming requests.",
                self._request_bytes,
            ),
            (
                "http_response_size_bytes",
                "Content length of outgoing responses.",
                self._response_bytes,
            ),
        ):
            lines.append(head_text(name, "summary", text))
            for handler, (count, total) in sizes.items():
                labels = label_text({"handler": handler})
                lines.append(f"{name}_count{{{labels}}} {count}\n{name}_sum{{{labels}}} {total}\n")
        return "".join(lines)

    def _durations(self) -> bytes:
        head = head_text(
            "http_request_duration_seconds", "histogram", "Latency with few buckets by handler."
        )
        return head.encode() + b"".join(h.render_samples() for h in self._by_route.values())


def _add(sizes: dict[str, tuple[int, int]], handler: str, size: int) -> None:
    count, total = sizes.get(handler, (0, 0))
    sizes[handler] = (count + 1, total + size)
