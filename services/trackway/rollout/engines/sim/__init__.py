"""The simulated engine: no model, the time of one. For load tests of the services around it.

Imported by `open_engine` only, by name.
"""
