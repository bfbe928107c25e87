"""The kinds of objects that the picker reads: one description of each, from which `crds/` is
written and by which objects are read.
"""
