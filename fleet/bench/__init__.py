"""`pointsman bench`: load for any OpenAI endpoint, and what it measures. Arrivals, data sets, SLOs
and statistics are values and functions of values; `client`, `driver` and `share` alone use a socket
or wait.
"""
