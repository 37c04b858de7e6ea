"""What verl's and verl-tool's users bring: tool_config files, tool classes, and the action/observation API.

Imported by `tools.loading` and the HTTP routes.
"""
