"""The HTTP front end. `server` is the application; below it come `routes`, `generate`, `schema` and
`http`, each of which imports only those after it. Nothing here starts or stops anything.
"""
