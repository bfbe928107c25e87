"""The client of an external latency predictor: several servers in turn, and a circuit breaker.

Theory of operation. A breaker keeps a failed predictor from delaying every request: after three
failures in a row it opens for ten seconds; then one request tries again, and only its success
closes the breaker. The latest samples wait for the training server in the background.
"""

import logging
from collections import deque
from collections.abc import Sequence

from picker.contrib.latency._predictor import (
    PREDICT_PATH,
    TRAIN_PATH,
    Features,
    Predicted,
    PredictorSettings,
    Sample,
    read_predictions,
)
from picker.framework.services import HttpClient, HttpError

log = logging.getLogger(__name__)

LOOK_UP_SECONDS = 0.4
# The part for HTTP: an HTTP error, unlike the end of the look-up, leaves other findings intact.
HTTP_SECONDS = 0.35
FAILURES = 3
PAUSE_SECONDS = 10.0


class PredictionServers:
    """Owns the breaker and the unsent samples."""

    def __init__(self, settings: PredictorSettings, http: HttpClient) -> None:
        self._settings = settings
        self._http = http
        self._samples: deque[Sample] = deque(maxlen=settings.max_samples)
        self._requests = 0
        self._failures = 0  # in a row
        self._retry_at = 0.0
        self._predicting = _Reachability("latency predictions")
        self._training = _Reachability("latency training samples")

    async def predict(
        self, features: Sequence[Features], now_seconds: float
    ) -> Sequence[Predicted | None]:
        """Return the predictions in the order of `features`, None for a missing one; return an
        empty sequence if there are none.
        """
        if not features or not self._settings.prediction_urls:
            return ()
        if self._failures >= FAILURES:
            if now_seconds < self._retry_at:
                return ()
            self._retry_at = now_seconds + PAUSE_SECONDS  # other requests wait for the result
        predicted, problem = await self._ask(features)
        if problem:
            self._predicting.failed(problem)
            self._failures += 1
            self._retry_at = now_seconds + PAUSE_SECONDS
        else:
            self._predicting.answered()
            self._failures = 0
        return predicted

    def learn(self, sample: Sample) -> None:
        if self._settings.training_url is not None:
            self._samples.append(sample)

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        """Send the samples; of those that cannot be sent, the latest `max_samples` remain."""
        samples = list(self._samples)
        self._samples.clear()
        size = self._settings.max_rows
        while samples:
            entries = [sample.entry(now_seconds, unix_seconds) for sample in samples[:size]]
            try:
                await self._http.post_json(
                    f"{self._settings.training_url}{TRAIN_PATH}",
                    {"entries": entries},
                    timeout_seconds=self._settings.timeout_seconds,
                )
            except HttpError as error:
                self._training.failed(str(error))
                unsent = [*samples, *self._samples]
                self._samples.clear()
                self._samples.extend(unsent)
                return
            self._training.answered()
            samples = samples[size:]

    async def _ask(self, features: Sequence[Features]) -> tuple[list[Predicted | None], str]:
        """Send rows until a batch fails; return predictions, None if missing, and the failure."""
        url = self._settings.prediction_urls[self._requests % len(self._settings.prediction_urls)]
        self._requests += 1
        size = self._settings.max_rows
        batches = [features[start : start + size] for start in range(0, len(features), size)]
        seconds = min(self._settings.timeout_seconds, HTTP_SECONDS / len(batches))
        predicted: list[Predicted | None] = []
        for batch in batches:
            body = {"requests": [one.row() for one in batch]}
            try:
                answer = await self._http.post_json(
                    f"{url}{PREDICT_PATH}", body, timeout_seconds=seconds
                )
                predicted.extend(read_predictions(answer, len(batch)))
            except (HttpError, ValueError) as error:
                missing = len(features) - len(predicted) if predicted else 0
                return predicted + [None] * missing, str(error)
        return predicted, ""


class _Reachability:
    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def failed(self, reason: str) -> None:
        if not self._failing:
            log.warning("%s fail from now on: %s", self._what, reason)
        self._failing = True

    def answered(self) -> None:
        if self._failing:
            log.warning("%s work again", self._what)
        self._failing = False
