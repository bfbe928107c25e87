"""The command line: its flags, and the configuration that they resolve to. Nothing here serves.

`table` lists the flags, `flags` resolves them, with `server` for the HTTP front end, `kv` for KV
that is published, moved or offloaded, and `speculation` for `--speculative-config`; `objects`
decodes values in JSON. `keywords` reads flags that are given as keyword arguments.
"""
