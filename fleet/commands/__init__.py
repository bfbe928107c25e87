"""The `pointsman` command and its small subcommands; larger ones have rooms of their own.

`cli` maps names to commands. `top` and `explain` show a running picker (`top_frame`, `top_text` and
`explain_text` are pure text), `chat` talks to a model, `config` and `replay` call the picker's
code, `capacity_plan` is `pointsman plan`, `parts` is `ps` and `logs`, `files` and `completion`
write files of the installation, and `tenants` adds tenants to a bootstrap.
"""
