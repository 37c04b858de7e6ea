"""The services on Ray Serve, and the `trackway` command that starts, watches and stops them.

The only package that knows Ray. Serve configs and manifests name `graph` (the applications), `autoscaling` (their
policy), `http_proxy` (limits of its connections) and `drain` (a node before it stops), so these four stay at the top.
"""
