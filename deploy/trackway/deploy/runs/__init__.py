"""Runs from the command line: starting, following and reporting them; the demo; `main_ppo` with its own services."""
