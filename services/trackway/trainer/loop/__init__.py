"""The training loop of a run, and how its parts are built from the configuration.

Imported by `worker`. `deploy` takes a run's forecast and the templates of its rollouts from here, without PyTorch.
"""
