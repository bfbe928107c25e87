"""What endpoint discovery decides: which resources there are, and what a client is sent of them
when. No I/O and no messages of Envoy's.
"""
