"""Handlers that decide which profiles run, and which result is primary (`ProfileHandler`)."""
