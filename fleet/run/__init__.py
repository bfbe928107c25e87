"""The processes of a fleet on this machine; the only commands here are `up` and `restart`.

`up` runs a fleet from start to stop. `layout` computes from the options which processes there are,
with `devices`, `models` (in the `catalog`) and `preflight` for what it needs; `process` supervises
one of them, with `reaper` for the case that `up` is killed; `members` and `rolling` exchange them
under load, by orders that arrive through `control`. `running_picker` lets other commands find the
fleet; `ports` and `proc` ask the operating system.
"""
