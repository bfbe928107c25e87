"""Endpoints of the suites: servers that answer with who they are and what they received."""
