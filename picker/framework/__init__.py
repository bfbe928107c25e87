"""The contracts between the picker and its plugins: protocols, shared attributes, the registry.

What a plugin computes belongs to `picker.plugins`; nothing here does I/O.
"""
