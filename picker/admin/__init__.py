"""The HTTP port: metrics, health, views of the pool and its requests, and a web page. It is
read-only and gets everything from an `AdminSource`.

`server` is the port, protected by `guarding`; `routes` serves the JSON of `views` and the `history`
of samples; `metrics_page` merges pools, and `page/` holds HTML and scripts.
"""
