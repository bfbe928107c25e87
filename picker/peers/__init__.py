"""The exchange of knowledge between the replicas of one picker.

`outbox`, `inbox`, `seeds` and `exchange` decide without I/O what to send and what to accept; `wire`
holds the messages of `proto/`, and `knowledge` connects the plugins that learn. `mesh` calls the
other replicas at the addresses that `discovery` finds, `server` takes their calls, and
`credentials` reads the certificates of both.
"""
