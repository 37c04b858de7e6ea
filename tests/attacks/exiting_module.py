"""A user's module that ends the process that imports it."""

import sys

sys.exit(7)
