"""The exchange of knowledge between the replicas of one picker.

`outbox`, `inbox`, `seeds` and `exchange` decide without I/O what to send and what to accept; `wire`
holds the messages of `proto/`, and `knowledge` connects the plugins that learn. `mesh` calls the
other replicas that `discovery` finds, `server` takes their calls.
"""
