"""What runs inside Ray Serve's replicas around each app: calls to every replica, direct ports, metrics of all replicas.

Imported by `deploy.graph` only.
"""
