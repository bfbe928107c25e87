"""The engine's process and the client that starts it; nothing here decides about a step.

client, child            in the API's process: requests and outputs, the child process
supervision              when a dead engine is started again
__main__, server         in the engine's process: its life, its loop
build                    the engine from its config
heartbeat                signs of life, and stalls
kv_events                the publisher of cache events
speculation_log          the log line about drafts
"""
