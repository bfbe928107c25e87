"""The pages of endpoints: when to fetch them, over which connection, and how to read them.

`scrape` polls, `http_client` holds the connections, `page_reader` parses a response, `exposition`
scans it for the series that `engines` names, `extract` turns them into metrics, `reading` tracks
their age. `sources` describes the configured pages.
"""
