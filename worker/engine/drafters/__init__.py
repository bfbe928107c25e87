"""Drafters that guess from tokens alone (prompt lookup, suffix decoding) and the texts they use.

`engine.lengths` says how many drafts to verify; `executor.drafting` drafts with networks.
"""
