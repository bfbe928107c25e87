"""One request from its arrival to its end: the director, and what it asks and changes."""
