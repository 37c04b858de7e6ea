"""The HTTP server base of the five services: settings, authentication, errors, health, limits."""

from trackway.serving.app import service_app
from trackway.serving.auth import AuthSettings, from_inside, needs_admin
from trackway.serving.metrics import Gauge
from trackway.serving.routes import ServiceRouter
from trackway.serving.settings import ServiceSettings

__all__ = ["AuthSettings", "Gauge", "ServiceRouter", "ServiceSettings", "from_inside", "needs_admin", "service_app"]
