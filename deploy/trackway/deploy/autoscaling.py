"""A Ray Serve autoscaling policy for services whose replicas are also called directly, without Serve's proxy."""

from ray.serve.config import AutoscalingContext

DIRECT_REQUESTS = "direct_requests"
"""Metric that each replica reports: requests in flight that did not come through the proxy."""


def all_requests(load: AutoscalingContext) -> tuple[float, dict[str, object]]:
    """Serve's own rule, applied to proxied and direct requests. Serve then applies bounds, factors and delays."""
    direct = sum((load.aggregated_metrics or {}).get(DIRECT_REQUESTS, {}).values())
    if load.config is None:
        return load.target_num_replicas, {}
    return (load.total_num_requests + direct) / load.config.get_target_ongoing_requests(), {}
