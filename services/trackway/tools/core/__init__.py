"""The tool server without HTTP: registry, instances and their life cycle, limits and metrics.

Imported by the server's APIs (`http`, `mcp`, `verl`). It depends on `BaseTool` and on no tool.
"""
