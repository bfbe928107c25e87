"""Understand the bodies of some paths (`Parser`)."""
