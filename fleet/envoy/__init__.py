"""The proxy in front of the fleet: its bootstrap, built from typed messages, and its binary."""
