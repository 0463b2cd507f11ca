"""Settings from flags, the environment and files."""

from __future__ import annotations

import pytest

from proxy.config import FanoutPath, Settings

PATHS = [FanoutPath(path="/init_broadcaster", rank_field="rank_offset"), FanoutPath(path="/areal_*")]


@pytest.mark.parametrize(
    "given",
    [
        "/init_broadcaster=rank_offset,/areal_*",
        ["/init_broadcaster=rank_offset,/areal_*"],
        ["/init_broadcaster=rank_offset", "/areal_*"],
        [{"path": "/init_broadcaster", "rank_field": "rank_offset"}, {"path": "/areal_*"}],
    ],
    ids=["environment", "one flag", "two flags", "file"],
)
def test_lists_of_paths(given: object) -> None:
    assert Settings(fanout_paths=given).fanout_paths == PATHS


def test_lists_of_engines() -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert Settings(engine=[",".join(urls)]).engine == Settings(engine=urls).engine == urls
