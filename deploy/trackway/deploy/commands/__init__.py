"""The sub-commands of `trackway`: each parses its words and calls a module of its own."""
