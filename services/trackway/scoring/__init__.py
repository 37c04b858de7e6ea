"""Pure scoring functions that several services need: values in, numbers out, no dependencies."""
