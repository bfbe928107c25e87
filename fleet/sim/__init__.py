"""`pointsman simulate`: fleets in virtual time, made of the picker's director and of the workers'
schedulers and caches. Load, statistics and reports are those of `fleet.bench`; nothing here opens a
socket, reads a real clock or starts a thread.
"""
