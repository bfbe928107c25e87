"""The loop that plans at each interval, and the scale of Deployments that it writes."""
