"""Latencies that the picker learns from its requests, and the types that act on predictions.

- `producer`: predicts the latency of a request at each endpoint, from what it learned or from
  prediction servers; `_learner` and `_model` learn, `_servers` and `_predictor` ask servers
- `scorers`: prefer endpoints by predicted headroom or by predicted cost
- `slo`: admits, filters and orders requests by their objectives; `_objectives` reads the headers
- `_meters`: compares predictions with the latencies of responses, for metrics
"""
