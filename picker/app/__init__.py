"""The composition root: options → objects → one task group; ports, reload, drain. No decisions."""
