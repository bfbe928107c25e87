"""Indexes which endpoint holds which prompt blocks: chained block hashes, an approximate and a
precise index, and the codec of KV-cache events. Pure; their sockets are in `picker.kvevents`.
"""
