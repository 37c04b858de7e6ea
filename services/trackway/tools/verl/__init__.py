"""Compatibility with verl and verl-tool: tool_config files, tool classes, and the action/observation API.

Imported by `tools.loading` and the HTTP routes.
"""
