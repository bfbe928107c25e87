"""The handlers behind the table of routes: `generation`, `tokenization`, `probes`, `control`,
`adapters`; and the prefill leg of a disaggregated request.
"""
