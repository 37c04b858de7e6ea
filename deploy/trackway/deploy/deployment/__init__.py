"""A deployment that runs, here or elsewhere: its record, its processes, its status, its replicas' installations."""
