"""`pointsman bench`: puts load on any OpenAI endpoint, and measures it.

`arrivals`, `workload`, `traces` and `load` make the load; `slo`, `summary`, `comparison`, `report`
and `page` turn outcomes into numbers and documents. All of these only compute values from values.
Only `client`, `driver` and `shard` use a socket or wait; `picker_config` changes the configuration
of a running picker, and `command` is the command.
"""
