"""Recordings of decisions and their replay, which runs the picker's own scheduler.

`lines` is the format; `requests`, `values` (findings) and `candidates` (changes) convert to it and
back. `recorder` makes lines of decisions for `file`. `replay` repeats decisions, with findings as
`sources` plans, and adds up the differences.
"""
