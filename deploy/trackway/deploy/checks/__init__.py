"""Checks of a run before its first step: invalid values, and requirements that this machine lacks.

Imported by `train`, `--dry-run` and `--preflight`. Modules collect all problems instead of raising at the first.
"""
