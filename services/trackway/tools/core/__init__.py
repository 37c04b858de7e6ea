"""The tool server without HTTP: tools, instances and their life cycle, limits and metrics.

Imported by the server's APIs. It depends on `BaseTool` and on no tool.
"""
