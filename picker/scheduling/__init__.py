"""How an endpoint is chosen: profiles of filters, scorers and a picker, and what plugins of those
kinds share. Pure: candidates and a random source in, endpoints out.
"""
