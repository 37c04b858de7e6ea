"""What the command line tells its user: one line with the remedy, exit status 2."""


class UserError(Exception):
    """Something the user can mend; the message says what was expected, what is, and what to do."""
