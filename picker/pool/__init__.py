"""The pool of one picker: endpoints, metrics, in-flight counts, objectives and rewrites."""
