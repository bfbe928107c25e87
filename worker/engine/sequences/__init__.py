"""Requests inside the engine and the step under construction; no decision is taken here.

sequence          one answer: its tokens, and how far they have run
live_sequences    the lines of waiting and running sequences
sequence_kv       the KV of sequences, in blocks and in tiers
planning          a step under construction and a step in flight
beams             beam search as a pure function
grammar           grammars, followed token by token
"""
