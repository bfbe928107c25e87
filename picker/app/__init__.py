"""The composition root: options → objects → one task group; ports, reload, drain. No decisions.

`picker` composes the `listeners`, and for each pool a `served_pool` of its endpoints
(`known_pool`), its configuration (`in_use`), its `plugin_tasks` and its `peering`. `pool_choice`
and `model_choice` choose a pool for a request. `shelves` loads optional parts; `cluster` is for
Kubernetes.
"""
