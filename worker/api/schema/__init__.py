"""What the API takes and answers: bodies, parameters, prompts, the table of routes and the
OpenAPI document made of them. Pure; nothing here runs a request.
"""
