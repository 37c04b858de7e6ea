"""The tool server without HTTP: tools by name, instances and their life cycle, limits and metrics of a call.

Imported by the faces of the server (`http`, `mcp`, `verl`). It knows `BaseTool`, and no tool.
"""
