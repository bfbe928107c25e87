"""The decision as one value, and those that keep it: the ring behind `explain`, and what people are
shown of it. Nothing here decides, and nothing here does I/O.
"""
