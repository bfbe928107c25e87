"""The shelf of autoscaling: how many replicas the workers of a pool need.

Everything is pure but `shell`, which runs the loop and writes to the cluster. `capacity` predicts
what replicas serve, `load_window` sums up an interval, `planner` decides, `autoscale_file` reads
settings.
"""
