"""The HTTP front end, by route family. `server` is the application; below it, each importing only
what follows: `routes`, `generate`, `schema`, `http`. Nothing here starts or stops anything.
"""
