"""OpenAI's routes and vLLM's additions: one module for each API, from the body to the frames.

`chat`, `completions`, `tokens` (`/inference/v1/generate`) and `embeddings` each make a `Prepared`;
`checks` has what they share. Other APIs are dialects: they are in `api/dialects`.
"""
