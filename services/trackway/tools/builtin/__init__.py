"""The built-in tools. Imported by `tools.loading`; the core does not depend on them."""
