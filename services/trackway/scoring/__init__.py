"""Pure scoring functions shared by several services: values in, numbers out, no dependencies."""
