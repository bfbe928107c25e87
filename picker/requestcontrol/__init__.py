"""One request from its arrival to its end: the director, and the modules that it calls."""
