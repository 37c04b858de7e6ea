"""Everything that can be known of a run before its first step: wrong values, and what this machine lacks.

Imported by `train`, `--dry-run` and `--preflight`. Each module finds, none raises at the first problem.
"""
