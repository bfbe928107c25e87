"""The command line: its flags, and the options that they resolve to. It opens and builds nothing.

`table` lists the flags, `readers` reads their values, `rules` names the flags that exclude each
other, and `flags` makes `options` of them; `pools` derives the options of each of several pools.
"""
