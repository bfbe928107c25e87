"""`pointsman doctor`: `*_look` modules gather what is there, `*_checks` judge it without I/O.

Nothing here changes what it looks at, and what was not looked at is not judged.
"""
