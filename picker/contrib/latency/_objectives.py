"""The latency objectives of a request, in its headers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# The first nonempty one counts; the second is the deprecated name.
TTFT_MS_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_MS_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Milliseconds to the first token and per token after it; None without an objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


def latency_objectives(headers: Mapping[str, str]) -> LatencyObjectives:
    return LatencyObjectives(
        _milliseconds(headers, TTFT_MS_HEADERS), _milliseconds(headers, TPOT_MS_HEADERS)
    )


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    text = headers.get(names[0]) or headers.get(names[1])
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
