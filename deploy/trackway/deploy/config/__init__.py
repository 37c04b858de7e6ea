"""Serve config files, and the services that a run's configuration asks for. Nothing is started here."""
