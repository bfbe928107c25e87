"""The pool of one picker: endpoints with their metrics, in-flight counts, objectives and rewrites,
and the endpoints file. No decisions and no cluster access belong here.
"""
