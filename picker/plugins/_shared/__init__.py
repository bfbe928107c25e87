"""Helpers that plugins of several kinds use. A helper for one kind is beside its plugins."""
