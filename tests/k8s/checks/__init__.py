"""Checks of the rendered manifests, without a cluster; one subject per module."""
