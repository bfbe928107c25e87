"""Filled in next."""
