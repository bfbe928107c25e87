"""The worker's `/metrics`: vLLM's series, rendered from a snapshot in tens of microseconds."""

from worker.metrics.page import CONTENT_TYPE, WorkerMetrics
from worker.metrics.record import RequestRecord

__all__ = ["CONTENT_TYPE", "RequestRecord", "WorkerMetrics"]
