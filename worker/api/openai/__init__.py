"""OpenAI's routes, and vLLM's beside them: a module an API, which reads from body to frames.

`chat`, `completions`, `tokens` (`/inference/v1/generate`) and `embeddings` each make a `Prepared`;
`checks` has what they share. Other APIs are dialects: they are in `api/dialects`.
"""
