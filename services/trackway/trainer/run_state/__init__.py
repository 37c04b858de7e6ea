"""A run on disk: its folder, owner, heartbeat and checkpoints, which the service and the worker share.

It contains no HTTP and no tracking backends.
"""
