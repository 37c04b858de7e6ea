"""Terminal output and exit of commands: spinners, bars, one-line errors, exit statuses. Knows no service."""
