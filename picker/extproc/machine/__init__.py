"""One ext_proc stream as a state machine: events in, actions out. No I/O, no protobuf."""
