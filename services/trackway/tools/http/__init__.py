"""The REST API of the tool server: routes, the examples of its OpenAPI document, and the fast path of a call."""
