"""The shelf of simulation: an engine without a model, and faults on purpose. No room imports it.

`runner` is the executor (`latency` its times, `tokens` its answers, `random` its draws), and
`injection` the faults of the HTTP process (`faults` their settings). `settings` are the simulator's
settings under their names, `flags` its part of the command line.
"""
