"""The HTTP port: metrics, health, views of the pool and its requests, the page. It changes nothing;
what it shows is asked of an `AdminSource`.
"""
