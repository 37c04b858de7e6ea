"""The training loop of a run, and how its parts are built from the configuration.

Imported by `worker` only. `deploy` imports `forecast`, and reads dumped trajectories with `trajectory_dump`.
"""
