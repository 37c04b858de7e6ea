"""A running deployment, local or remote: its record, processes, status, and the installations of its replicas."""
