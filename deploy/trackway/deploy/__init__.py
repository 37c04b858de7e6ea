"""The top floor: the services on Ray Serve, and the `trackway` command that starts, watches and stops them."""
