"""The plugins: a folder per kind, a file per type, named like the type, that defines `PLUGIN`.

Helpers begin with `_`: beside the plugins of one kind, in `_shared` for several. Plugins do no I/O
but through `framework.services`.
"""
