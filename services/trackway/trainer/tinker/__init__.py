"""Tinker's API on the trainer service: a training loop in the caller's own process, with the models here.

A session is a folder `outputs/<session>/calls/`. It becomes a run when it creates its first model. The service appends
requests to the run's log and reads the results that its process writes (trackway.trainer.calls). Samples come from the
rollout service. `app` mounts the routes. Nothing else imports this package.
"""
