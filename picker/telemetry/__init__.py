"""The watchers of decisions that report to the outside: series, spans, gauges computed on demand.
They read what happened; nothing here changes what happens.
"""
