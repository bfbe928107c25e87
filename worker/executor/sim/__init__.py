"""The simulator: an executor that takes the time of a step from a model and makes up its tokens.

Latency models, token sources and their random numbers; its settings and flags are the program's.
"""
