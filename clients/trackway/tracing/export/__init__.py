"""Ended spans to trace backends: encoding, bounded queues, the disk queue, OTLP over HTTP.

Imported by `tracing.provider`. Nothing here knows what a span means; names of attributes stay in `tracing.attributes`.
"""
