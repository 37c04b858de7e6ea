"""verl's tracing API (verl/utils/rollout_trace.py), so that a custom agent loop is traced by changing one import.

Imported by users through `trackway.tracing`. The services use `tracing.spans`.
"""
