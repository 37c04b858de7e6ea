"""What crosses a process: pydantic models and the error table, and nothing else."""
