"""A run on disk: its folder, who owns it, its heartbeat, its checkpoints. The service and the worker meet here.

It knows no HTTP and no backend.
"""
