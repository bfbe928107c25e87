"""The pages of endpoints: when to fetch them, over which connection, and how to read them.

`scrape` polls on a tick and `http_client` holds the connections; all other files are pure:
`page_reader` parses one HTTP response, `exposition` scans its series, `engines` names the series of
each engine, `extract` turns them into metrics, `reading` tracks their age, `sources` and
`page_parameters` describe the configured pages.
"""
