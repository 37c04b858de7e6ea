"""What is checked of the rendered manifests before a cluster sees them; one subject a module."""
