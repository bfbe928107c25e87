"""One request from its arrival to its end: the director, and what it asks and changes on the way.
How an endpoint is chosen is `scheduling`'s business, and the ext_proc protocol is `extproc`'s.
"""
