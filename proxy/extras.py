"""What comes with extras of the package and may be missing."""

from __future__ import annotations

from importlib.util import find_spec

OTEL_INSTALL = "pip install 'fleetgate[otel]'"


def otel_installed() -> bool:
    """Whether spans can be made and sent."""
    try:
        return all(find_spec(name) for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"))
    except ModuleNotFoundError:
        return False
