"""The types of bodies and answers, the checks of bodies, the table of routes and the OpenAPI
document. Nothing here knows the engine or a tokenizer.

`parse` decodes strictly, `requests`, `embeddings` and `answers` are the types, `routes` the table,
`openapi` the document. `conversation`, `tools`, `params`, `constraints` with `json_schemas`, and
`kv_transfer` check the fields of requests.
"""
