"""The trainer: runs as folders, their worker processes, the GRPO step, metrics and traces.

app, settings  the service: start, watch, stop and resume runs
worker         a run's own process

The rooms, lowest first: `config` and `metrics`, `data`, `learner`, `run_state`, `delivery`, `traces` and `tracking`,
`loop`, `supervisor`. The service never imports the loop; both meet in `run_state`.
"""
