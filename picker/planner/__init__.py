"""The shelf of autoscaling: how many replicas the workers of a pool need.

Pure, but for `shell`: `capacity` predicts what replicas serve, `load_window` sums up the requests
of an interval, `planner` decides on the next number, `autoscale_file` reads the groups and bounds.
`shell` runs that loop and writes to the cluster. The core imports nothing of it
(`picker.app.shelves`).
"""
