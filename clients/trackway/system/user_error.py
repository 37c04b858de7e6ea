"""Errors of the command line: one line with the remedy, exit status 2."""


class UserError(Exception):
    """An error that the user can fix. The message says what was expected, what was found, and the remedy."""
