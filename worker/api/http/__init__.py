"""The wire: one connection, one exchange, one arrival, and the limits of bodies. Nothing here
knows a route or a model.
"""
