"""How many replicas a service needs that is also called past Serve's proxy; a policy for Ray Serve's autoscaler."""

from ray.serve.config import AutoscalingContext

DIRECT_REQUESTS = "direct_requests"
"""What each replica reports: requests in work that did not come through the proxy."""


def all_requests(load: AutoscalingContext) -> tuple[float, dict[str, object]]:
    """Serve's own rule with both kinds of requests; Serve then applies bounds, factors and delays."""
    direct = sum((load.aggregated_metrics or {}).get(DIRECT_REQUESTS, {}).values())
    if load.config is None:
        return load.target_num_replicas, {}
    return (load.total_num_requests + direct) / load.config.get_target_ongoing_requests(), {}
