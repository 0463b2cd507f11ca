"""Shared by the data plane's scenarios: the tools are found from the root of the tree, however pytest was started."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

import pytest
import uvloop

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    """Every scenario runs on uvloop, which the product uses, and on plain asyncio, which it may run on."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
