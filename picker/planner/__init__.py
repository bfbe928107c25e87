"""How many replicas a pool of workers needs: capacity, forecast, and the decision of one interval.
Pure: what was observed comes in, a plan goes out; `picker.app.autoscaling` writes it to a cluster.
"""
