"""The built-in tools. Imported by `tools.loading`. The core does not depend on them."""
