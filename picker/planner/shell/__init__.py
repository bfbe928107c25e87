"""The loop that plans at each interval, and the scale of the Deployments that it writes."""
