"""`trackway up` and `down`: start and stop Ray, MLflow and the five services on this machine."""
