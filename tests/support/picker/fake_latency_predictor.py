"""A latency predictor in place of the HTTP client that would ask one."""

from dataclasses import dataclass, field
from typing import Any

from picker.framework.services import HttpError


@dataclass
class FakeLatencyPredictor:
    """Predict 100 ms and 10 ms times the row's number, `answer`, or a failure."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    failing: bool = False
    answer: Any = None

    async def post_json(self, url: str, body: Any, **_: Any) -> Any:
        self.asked.append((url, body))
        if self.failing:
            raise HttpError("no")
        if "entries" in body:
            return None
        if self.answer is not None:
            return self.answer
        rows = range(1, len(body["requests"]) + 1)
        return {"predictions": [{"ttft_ms": 100.0 * n, "tpot_ms": 10.0 * n} for n in rows]}
