"""The pool of one picker: endpoints with their metrics, in-flight counts, objectives and rewrites,
and the endpoints file. Not what decides by them, and no cluster.
"""
