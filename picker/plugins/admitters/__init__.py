"""Refuse requests once producers have looked at them (`Admitter`)."""
