"""`@function_tool`: a typed function as a tool without state, its JSON schema taken from its signature."""
