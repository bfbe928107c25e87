"""The sockets on which engines publish KV-cache events, and what keeps them connected.

The pure codec and the index that events feed are in `picker.prefix`.
"""
