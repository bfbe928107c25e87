"""The prefix index: chained block hashes, which endpoint has which blocks, and the codec of
engines' KV-cache events. Pure; the sockets that events arrive on are in `picker.kvevents`.
"""
