"""The shelf of simulation: an engine without a model, and injected faults. No room imports it.

`runner` is the executor (`latency` its times, `tokens` its answers, `random` its draws),
`tokenizer` makes texts of its tokens. `injection` has the faults of the HTTP process (`faults`
their settings). `config` is the frozen configuration of both, `flags` their part of the command
line; `settings` parses and shows the simulator's settings.
"""
