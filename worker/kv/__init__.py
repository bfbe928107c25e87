"""KV that moves between engines: what it is of, who may have it, and its way over TCP. No scheduling
decisions and no tensors.
"""
