"""Runs from the command line: started, followed, reported; the demo, and `main_ppo` with services of its own."""
