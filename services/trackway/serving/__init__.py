"""What the five services have in common as HTTP servers: settings, error answers, health, idempotency, limits."""

from trackway.serving.app import service_app
from trackway.serving.metrics import Gauge
from trackway.serving.settings import ServiceSettings

__all__ = ["Gauge", "ServiceSettings", "service_app"]
