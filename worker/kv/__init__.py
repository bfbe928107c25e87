"""KV that moves between engines, or to a disk: what it is of, who may have it, its way over TCP,
files. Tensors and scheduling are elsewhere.
"""
