import random
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.calls import CALLS, OWN_PATHS
from proxy.core.paths import PathTable, Route, classify

PLAIN = sorted([*CALLS, *OWN_PATHS, "/fleet/engines/a:1/drain", "/fleet/ui"])


@pytest.mark.parametrize("path", PLAIN)
def test_control_paths_in_their_plain_spelling(path):
    raw = path.encode()
    assert classify(raw) is Route.CONTROL
    assert classify(raw + b"/") is Route.CONTROL
    assert classify(raw + b"?mode=keep&x=%2f..//") is Route.CONTROL


@pytest.mark.parametrize(
    "target",
    ["/v1/completions", "/", "/v1/models", "/paused", "/v1/pause", "/tokenize?x=/pause", "/v1/files/%2e", "/a%2fb", "*",
     "/PAUSE", "/v1//models", "/generate;x=/pause", "/fleetx", "/resume2", "/v1/resume/1"],
)  # fmt: skip
def test_data_paths(target):
    assert classify(target.encode()) is Route.DATA


@pytest.mark.parametrize(
    "target",
    [b"/%70ause", b"//pause", b"/./pause", b"/v1/../pause", b"/pause%0a", b"/pause%00", b"/pause%20", b"/%2570ause",
     b"/pause;x=1", b"\\pause", b"/v1\\..\\pause", b"/pause//", b"/pause/.", b"/v1/%2e%2e/pause", b"/pause%3fmode=keep",
     b"/pause%23", b"/v1/load%5flora_adapter", b"//v1/load_lora_adapter", b"/fleet/../pause", b"/%66leet/engines",
     b"/.%2fpause", b"/pause%2f", b"/x/..;/pause", b"/p%61use?mode=keep", b"/fleet//engines", b"/health%0d%0a"],
)  # fmt: skip
def test_control_paths_in_disguise_are_refused(target):
    assert classify(target) is Route.REFUSE


def test_a_path_that_never_stops_decoding_is_refused():
    target = b"/pause"
    for _ in range(12):
        target = quote(target, safe="/").replace("p", "%70").encode()
    assert classify(target) is Route.REFUSE


def disguise(rng: random.Random, path: str) -> bytes:
    """One of many spellings that a lenient server reads as ``path``."""
    out = ""
    for char in path:
        kind = rng.randrange(6)
        if char == "/" and kind == 0:
            out += rng.choice(["//", "/./", "/x/../", "\\", "/%2e/", "/.;a/"])
        elif kind == 1:
            out += f"%{ord(char):02x}"
        elif kind == 2:
            out += f"%25{ord(char):02X}"
        else:
            out += char
    return (out + rng.choice(["", "/", "%0a", ";v=1", "%00", "//"])).encode()


def test_five_hundred_disguises_never_pass_for_data():
    rng = random.Random(7)
    for _ in range(500):
        path = rng.choice(PLAIN)
        target = disguise(rng, path)
        route = classify(target)
        assert route is not Route.DATA, target
        if route is Route.CONTROL:
            assert b"%" not in target


@given(st.binary(max_size=40))
def test_control_is_only_what_is_spelled_so(raw):
    target = b"/" + raw
    if classify(target) is Route.CONTROL:
        path = target.partition(b"?")[0].rstrip(b"/")
        assert path.decode() in PLAIN or path.startswith(b"/fleet/")


def test_configured_paths_and_prefixes():
    table = PathTable(["/areal_*", "/init_broadcaster/", "/skyrl/*"])
    assert table.classify(b"/areal_update_weights?x=1") is Route.CONTROL
    assert table.classify(b"/init_broadcaster") is Route.CONTROL
    assert table.classify(b"/skyrl/v1/x/") is Route.CONTROL
    assert table.classify(b"/skyrl/v1/generate") is Route.DATA
    assert table.classify(b"/skyrl/v1/generate/?x=1") is Route.DATA
    assert table.classify(b"/skyrl/../pause") is Route.REFUSE
    assert table.classify(b"/skyrl/../v1/models") is Route.DATA
    assert table.classify(b"/%61real_x") is Route.REFUSE
    assert table.classify(b"/areal") is Route.DATA
