"""The HTTP port: metrics, health, views of the pool and its requests, the page. It is read-only and
gets everything from an `AdminSource`.

`server` is the port behind `guarding`, `routes` are its pages, with the JSON of `views` and the
`history` of samples; `metrics_page` merges pools, `page/` is HTML and scripts.
"""
