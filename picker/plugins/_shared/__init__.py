"""Helpers that plugins of several kinds use; a helper of one kind is beside its plugins."""
