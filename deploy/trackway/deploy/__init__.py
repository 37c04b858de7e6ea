"""The services on Ray Serve, and the `trackway` command that starts, watches and stops them.

The only package that imports Ray. Serve configs and manifests refer to `graph` (the applications), `autoscaling` (their
policy), `http_proxy` (connection limits) and `drain` (emptying a node), so these four stay at the top level.
"""
