"""The composition root: options → objects → one task group; ports, reload, drain. No decisions.

`picker` composes everything: the `listeners`, and a `served_pool` for each pool, with its endpoints
(`known_pool`), its configuration (`in_use`), the tasks of its plugins (`plugin_tasks`), and its
peers (`peering`). With several pools `pool_choice` and `model_choice` choose one for a request.
`shelves` loads optional parts; `cluster` and `leadership` are for Kubernetes.
"""
