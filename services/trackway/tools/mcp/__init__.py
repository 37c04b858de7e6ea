"""Model Context Protocol, both ways: tools of other servers here, ours at /mcp. On the official SDK.

Imported by `tools.loading` and `tools.app`.
"""
