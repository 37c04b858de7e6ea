"""Evaluations: rollouts of each row of a dataset, stored as a run that only validated, summed up and compared.

store = EvaluationStore(outputs / "eval-1"). store.begin(evaluation, config)
store.add(group) ... store.finish(); summary(store.trajectories(), evaluation)
"""
