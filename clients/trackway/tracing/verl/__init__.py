"""verl's tracing API (verl/utils/rollout_trace.py): a user's own agent loop is traced by changing one import.

Imported by users through `trackway.tracing`; the services use `tracing.spans`.
"""
