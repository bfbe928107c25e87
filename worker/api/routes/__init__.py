"""The handlers behind the table of routes, one module for each family. What they share belongs
to `generate` or `http`.
"""
