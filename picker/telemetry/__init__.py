"""The watchers of decisions that report to the outside: series, spans, and gauges on demand."""
