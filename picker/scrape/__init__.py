"""The pages of endpoints: when to fetch them, over which connection, and what is read from them.

`exposition`, `engines`, `extract` and `sources` are pure; only `scrape` and `http_client` do I/O.
"""
