"""The tests, and the modules that they share: `tests.<folder>.<module>`, importable from the repository root."""
