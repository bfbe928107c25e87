"""The exchange of knowledge between replicas of one picker: `outbox`, `inbox`, `seeds` and
`exchange` decide what is sent and what is taken in; `mesh` and `server` make the calls. Messages
are those of `proto/`. What is exchanged belongs to the rooms that learn it.
"""
