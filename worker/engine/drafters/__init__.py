"""Drafters that guess from tokens alone: prompt lookup and suffix decoding, and texts they search.

How many drafts to verify is `engine.lengths`; drafters that run a network are `executor.drafting`.
"""
