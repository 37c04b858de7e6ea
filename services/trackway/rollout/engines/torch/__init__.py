"""The embedded engine: continuous batching on torch, in the replica's process."""
