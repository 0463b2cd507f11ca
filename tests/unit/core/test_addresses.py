import pytest

from proxy.core.addresses import parse_engines_dns


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("engines.rl.svc:8000", ("engines.rl.svc", 8000)),
        ("::1:8000", ("::1", 8000)),
        ("_http._tcp.engines.rl.svc", ("_http._tcp.engines.rl.svc", None)),
        ("srv:engines.rl.svc", ("engines.rl.svc", None)),
    ],
)
def test_addresses_have_a_port_and_srv_records_bring_one(value, said):
    assert parse_engines_dns(value) == said


@pytest.mark.parametrize("value", ["engines", "engines:", ":8000", "engines:0", "engines:70000", "engines:eight", ""])
def test_addresses_need_a_port(value):
    with pytest.raises(ValueError, match="must be NAME:PORT"):
        parse_engines_dns(value)


@pytest.mark.parametrize("value", ["srv:", "_http._tcp.engines:8000", "srv:engines:8000", "srv:two words"])
def test_srv_names_have_none(value):
    with pytest.raises(ValueError, match="without a port, such as _http"):
        parse_engines_dns(value)
