"""Export of ended spans to trace backends: encoding, bounded queues, the disk queue, OTLP over HTTP.

Imported by `tracing.provider`. Independent of what spans mean. Attribute names are in `tracing.attributes`.
"""
