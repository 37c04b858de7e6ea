"""`@function_tool`: a typed function as a stateless tool, with a JSON schema from its signature."""
