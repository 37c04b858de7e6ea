"""The simulated engine: generates no real text but takes a model's time. For load tests of the services.

Imported by `open_engine` only, by name.
"""
