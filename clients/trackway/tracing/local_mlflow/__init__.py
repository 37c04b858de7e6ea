"""A local MLflow database as a server that takes spans: one server process per database, shared by all its clients.

client         finds the server of a database or starts it
mlflow_server  the process that keeps the server; runs as a script, with the standard library alone
uri            what an MLflow tracking URI means

Imported by tracing's exporters, `trackway up` and the trainer. MLflow itself is imported by the server's process only.
"""
