"""The plugin types that shipped configurations and the reference's default profiles use.

A folder holds the types of one kind, a file beside the folders all types of a small kind or of one
subject. A file defines `PLUGIN`, which has its name, or `PLUGINS`. Names of helpers begin with `_`;
helpers for several kinds are in `_shared`. Plugins do I/O only through `framework.services`.

- `admitters`, `deciders`, `detectors`, `eviction_policies`, `fairness_policies`, `filters`,
  `ordering_policies`, `pickers`, `producers`, `profile_handlers`, `scorers`, `usage_limits`:
  types that decide
- `data_sources`, `discoveries`, `extractors`, `parsers`: types that read pages, files and bodies
- `session_affinity`, `topology`, `endpoint_attribute`, `conformance`: types of several kinds
"""
