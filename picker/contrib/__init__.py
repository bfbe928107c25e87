"""The shelf of rare plugin types: no configuration that this project ships names one of them.

Nothing imports this package: the catalog (`config.catalog`) finds its types as it finds those of
`picker.plugins`. Deleting a file, or all of them, removes its types and breaks nothing else. A file
holds the types of one subject in `PLUGINS`; names of helpers begin with `_`.

- `latency`: latencies that the picker learns, and the types that act on predictions
- `grpc_parsers`: request bodies of vLLM's and Vertex AI's gRPC services
- `multicluster`: pools of other clusters as endpoints
- `rollout`, `program_aware`, `burst`: rollouts of DisaggregatedSets, fairness among programs,
  simultaneous requests
- `mm_embeddings`, `p2p`, `context_length`, `dcgm`: caches of encoders, KV from peers, endpoints by
  prompt length, GPU load
- `other_routers`: the formulas of sglang-router, rendezvous hashing and NVIDIA Dynamo
- `request_attributes`: numbers computed from a response's usage
- `token_limits`: tokens a minute of tenants and models, which the gateway names
"""
