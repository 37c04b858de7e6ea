"""The services on Ray Serve, and the `trackway` command that starts, watches and stops them.

The only package that imports Ray. Serve configs and manifests refer to `graph` (the applications), `autoscaling` (their
policy), `http_proxy` (connection limits), `drain` (emptying a node) and `probe` (readiness of a pod), so these stay at
the top level.
"""
