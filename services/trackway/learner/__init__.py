"""Trajectories in, updated weights and metrics out: filtering, batches, losses, the policy, the optimizer.

Imported by `loop`. It knows no service, no run folder and no trace.
"""
