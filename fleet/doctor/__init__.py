"""`pointsman doctor`: `*_look` modules gather facts, `*_checks` judge them without I/O, and
`checks.txt` has the texts of their findings.

Nothing here changes a system, and facts that were not gathered are not judged. `diagnosis` combines
judges and texts (`table`), `paths` and `web` read documents and pages, `command` is the command.
"""
