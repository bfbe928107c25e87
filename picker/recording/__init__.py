"""Recordings of decisions and their replay; nothing here decides, except the picker's own
scheduler that `replay` runs.

`lines` is the format; `requests`, `values` (findings) and `candidates` (changes) convert to it and
back. `recorder` makes lines of decisions for `file`. `replay` repeats decisions, with findings as
`sources` plans; `comparison` adds up the differences.
"""
