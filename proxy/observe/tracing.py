"""Whether requests and control calls are traced. OpenTelemetry is imported only where they are.

It comes with the extra ``fleetgate[otel]``. Where spans go, how they are sampled and what the service is called is said
in OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``, ...).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from proxy import extras

if TYPE_CHECKING:
    from proxy.config import Settings
    from proxy.observe.spans import Spans

_log = logging.getLogger("fleetgate.tracing")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that name a collector (OpenTelemetry specification, "OpenTelemetry Protocol Exporter")."""


def wanted(settings: Settings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether spans are to be made: the setting says so, or it says nothing and a collector is named."""
    if settings.otel is not None:
        return settings.otel
    return any(environ.get(name) for name in ENDPOINTS)


def start(settings: Settings) -> Spans | None:
    """What makes spans and sends them; None where nobody wants them or the extra is missing."""
    if not wanted(settings):
        return None
    if not extras.otel_installed():
        _log.warning(
            "a collector is named, but no spans are made: OpenTelemetry is not installed (%s)", extras.OTEL_INSTALL
        )
        return None
    from proxy.observe.spans import Spans, exporting  # noqa: PLC0415 - an extra, and slow to import

    return Spans(exporting())
