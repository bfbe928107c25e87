"""The decisions of endpoint discovery: the resources, and the responses to each client. No I/O and
no messages of Envoy.
"""
