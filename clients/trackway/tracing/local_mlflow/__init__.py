"""A local MLflow database as a server that takes spans: one server process per database, shared by all its clients.

client         finds or starts the server of the database that a tracking URI names
mlflow_server  the process that supervises the server. A script that needs only the standard library

Imported by tracing's exporters, `trackway up` and the trainer. MLflow itself is imported by the server's process only.
"""
