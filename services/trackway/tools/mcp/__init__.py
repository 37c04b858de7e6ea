"""Model Context Protocol: tools of other servers as ours, and our tools at /mcp. Uses the official SDK.

Imported by `tools.loading` and `tools.app`.
"""
