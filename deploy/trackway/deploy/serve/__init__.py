"""Additions to each app inside Ray Serve's replicas: calls to every replica, direct ports, metrics of all replicas.

Imported by `deploy.graph`. `deploy.runs.trial` takes the direct port alone.
"""
