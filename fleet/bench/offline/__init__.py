"""`pointsman bench offline`: the throughput of an engine without a server. `command` makes the work
and prints the results, `engines` does the work, in a process for each engine, and `random_weights`
makes the model that is used without `--model`.
"""
