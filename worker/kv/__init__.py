"""KV that moves between engines: what it is of, who may have it, its way over TCP. Tensors and
scheduling are elsewhere.
"""
