"""The trainer: runs as folders, their worker processes, the GRPO step, metrics and traces.

app, settings  the service: start, watch, stop and resume runs
worker         a run's own process

The rooms, lowest first: `metrics`, `data`, `run_state`, `delivery`, `traces`, `loop`, `supervisor`. The service never
imports the loop; both meet in `run_state`.
"""
