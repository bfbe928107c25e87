"""The pool as the picker knows it: endpoints and their metrics, requests under way, objectives and
rewrites. Sources write it, decisions read immutable snapshots; no clock in here, and no cluster.
"""
