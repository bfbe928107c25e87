"""The contracts between the picker and its plugins: protocols, shared attributes, the registry.

Computations of plugins belong to `picker.plugins`; nothing here does I/O.
"""
