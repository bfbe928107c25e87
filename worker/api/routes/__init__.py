"""The handlers behind the table of routes, a module for each family: `generation`, `tokenization`,
`probes`, `control`, `adapters`; and the prefill leg of a disaggregated request. Parts that they
share belong to `generate` or `http`.
"""
