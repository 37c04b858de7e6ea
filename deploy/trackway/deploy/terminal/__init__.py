"""What commands print and how they end: spinners, bars, one-line errors, exit statuses. It knows no service."""
