"""`import trackway`: training and evaluation as Python calls, over the same parts as the command line."""
