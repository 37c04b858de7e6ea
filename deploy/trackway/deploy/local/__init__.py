"""`trackway up` and `down`: Ray, MLflow and the five services on this machine."""
