"""Flags, environment and file: who wins, and what is refused with which words."""

from __future__ import annotations

import json
import os

import pytest

from proxy.sources import ConfigError, load


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch):
    for name in os.environ:
        if name.startswith("FLEETGATE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "fleetgate.yaml"
        path.write_text(text)
        return path

    return write


def test_a_flag_beats_the_environment_which_beats_the_file(file, monkeypatch):
    config = file("port: 1\nhold-timeout: 2\nmin_engines: 3\n")
    monkeypatch.setenv("FLEETGATE_HOLD_TIMEOUT", "20")
    monkeypatch.setenv("FLEETGATE_MIN_ENGINES", "30")
    settings = load({"min_engines": 300}, config)
    assert (settings.port, settings.hold_timeout, settings.min_engines) == (1, 20.0, 300)


def test_the_environment_may_name_the_file(file, monkeypatch):
    monkeypatch.setenv("FLEETGATE_CONFIG", str(file("port: 7\n")))
    assert load({}).port == 7


def test_an_empty_file_says_nothing(file):
    assert load({}, file("# nothing yet\n")).port == 8000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1\n", "unknown key 'prot'; did you mean port?"),
        ("PORT: 1\n", "unknown key 'PORT'; did you mean port?"),
        ("zzqx: 1\n", "unknown key 'zzqx'; did you mean "),
        ("1: 1\n", "unknown key 1; did you mean "),
        ("null: 1\n", "unknown key None; did you mean "),
        ("hold-timeout: 1\nhold_timeout: 2\n", "hold_timeout is given twice, as hold-timeout and as hold_timeout"),
        ("port: 1\nport: 2\n", "port is given twice; keep one"),
        ("config: other.yaml\n", "'config' names a file of settings and cannot stand in one; use --config"),
        ("- port\n", "must be a mapping of settings"),
        ("a: [\n", "is not YAML"),
        ("port: many\n", "port: Input should be a valid integer"),
        ("port: 70000\n", "port: Input should be less than or equal to 65535"),
        ("engine: [http://h:1/v1]\n", "give the server's root"),
        ("engine: [http://h:1, 'http://h:1/']\n", "is given twice"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_what_would_be_right(file, text, words):
    with pytest.raises(ConfigError) as error:
        load({}, file(text))
    assert words in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config file .*absent\.yaml: No such file"):
        load({}, tmp_path / "absent.yaml")


def test_a_file_that_is_not_utf_8_is_told(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_bytes(b"log_level: info # \xe9\n")
    with pytest.raises(ConfigError, match=r"old\.yaml is not UTF-8 text \(byte 18\)"):
        load({}, path)


@pytest.mark.parametrize(
    "name", ["FLEETGATE_PORT_NUMBER", "FLEETGATE_SERVICE", "FLEETGATE_PORT_8000", "FLEETGATE_ZZQX"]
)
def test_a_variable_that_only_looks_like_a_service_link_is_an_error(name, monkeypatch):
    monkeypatch.setenv(name, "8000")
    with pytest.raises(ConfigError, match=f"unknown environment variable {name}; did you mean FLEETGATE_"):
        load({})


@pytest.mark.parametrize("service", ["FLEETGATE", "FLEETGATE_CONTROL"])
def test_what_kubernetes_sets_for_a_service_is_no_setting(service, monkeypatch):
    for name, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP_CONTROL": "8000",
        "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_53_UDP": "udp://10.0.0.1:53",
    }.items():
        monkeypatch.setenv(f"{service}_{name}", value)
    settings = load({})
    assert (settings.port, settings.control_port) == (8000, None)
    assert not settings.model_fields_set


def test_the_port_is_a_setting_for_all_that(monkeypatch, file):
    monkeypatch.setenv("FLEETGATE_PORT", "tcp://10.0.0.1:8000")
    assert load({}, file("port: 9\n")).port == 9
    monkeypatch.setenv("FLEETGATE_PORT", "7")
    assert load({}, file("port: 9\n")).port == 7
    monkeypatch.setenv("FLEETGATE_PORT", "many")
    with pytest.raises(ConfigError, match="port: Input should be a valid integer"):
        load({})


def test_an_unknown_variable_is_told_but_not_those_of_others(monkeypatch):
    # Kubernetes sets these for a service that is called fleetgate; the launcher and the tests have theirs.
    for name in ("FLEETGATE_SERVICE_HOST", "FLEETGATE_PORT_8000_TCP", "FLEETGATE_VLLM"):
        monkeypatch.setenv(name, "x")
    load({})
    monkeypatch.setenv("FLEETGATE_ENGINES", "http://h:1")
    with pytest.raises(
        ConfigError, match="unknown environment variable FLEETGATE_ENGINES; did you mean FLEETGATE_ENGINE"
    ):
        load({})


@pytest.mark.parametrize(
    ("settings", "safe"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "fleetgate.example"}, False),
        ({"host": "0.0.0.0", "control_token": "t"}, True),
        ({"host": "0.0.0.0", "insecure_control": True}, True),
        ({"host": "0.0.0.0", "control_port": 9000}, False),
        ({"host": "0.0.0.0", "control_port": 9000, "control_host": "127.0.0.1"}, True),
        ({"control_port": 9000, "control_host": "0.0.0.0"}, False),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
    ],
)
def test_a_control_plane_that_strangers_could_reach_is_refused(settings, safe):
    if safe:
        load(settings)
    else:
        with pytest.raises(ConfigError, match="set --control-token"):
            load(settings)


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({"port": 9000, "control_port": 9000}, False),
        ({"port": 9000, "control_port": 9001}, True),
        ({"port": 0, "control_port": 0}, True),
        ({"port": 9000, "control_port": 9000, "control_host": "127.0.0.2"}, True),
        ({"port": 9000, "control_port": 9000, "control_host": "localhost"}, False),
        ({"port": 9000, "control_port": 9000, "host": "0.0.0.0", "control_host": "127.0.0.1"}, False),
        ({"port": 9000, "control_port": 9000, "host": "::1", "control_host": "127.0.0.1"}, True),
    ],
)
def test_two_listeners_need_two_ports(settings, possible):
    if possible:
        load(settings)
    else:
        with pytest.raises(ConfigError, match="--port and --control-port are both 9000"):
            load(settings)


@pytest.mark.parametrize("name", ["control_token", "engine_api_key"])
@pytest.mark.parametrize("secret", ["", " ", "\t\n"])
def test_an_empty_secret_is_refused_wherever_it_comes_from(name, secret, file, monkeypatch):
    option = name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{option}: it is empty; give a secret, or leave it out"):
        load({"host": "0.0.0.0", name: secret})
    with pytest.raises(ConfigError, match=f"{option}: it is empty"):
        load({}, file(f"{name}: {json.dumps(secret)}\n"))
    monkeypatch.setenv(f"FLEETGATE_{name.upper()}", secret)
    with pytest.raises(ConfigError, match=f"{option}: it is empty"):
        load({"host": "0.0.0.0"})


@pytest.mark.parametrize("name", ["control_token", "engine_api_key"])
@pytest.mark.parametrize("secret", ["canary-51c2\n", " canary-51c2", "canary\r\nX: 51c2", "canary-\u20ac51c2"])
def test_a_secret_that_no_field_can_carry_is_refused_and_not_told(name, secret):
    with pytest.raises(ConfigError, match="no Authorization field can carry it") as error:
        load({name: secret})
    assert "canary" not in str(error.value)


def test_a_secret_may_be_any_printable_text():
    assert load({"host": "0.0.0.0", "control_token": "t \xe9/+="}).control_token is not None


def test_half_of_a_certificate_is_refused():
    with pytest.raises(ConfigError, match="go together"):
        load({"tls_cert": "cert.pem"})


def test_no_secret_is_in_what_is_told():
    with pytest.raises(ConfigError) as error:
        load({"control_token": ["canary-51c2"]})
    assert "canary" not in str(error.value)
