"""What can be told about images and compose files without a container engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from engine_launcher.sim.__main__ import _parser as sim_parser
from proxy.cli import main
from proxy.config import Settings
from proxy.sources import load

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile*") if path.suffix != ".dockerignore")
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
K8S = sorted(DOCKER.glob("k8s/*.yaml"))


def instructions(path):
    """The instructions of a Dockerfile as (name, arguments), continuation lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def arguments(path, name):
    return [rest for instruction, rest in instructions(path) if instruction == name]


def services():
    return [
        (path.name, name, service)
        for path in COMPOSE
        for name, service in (yaml.safe_load(path.read_text())["services"]).items()
    ]


def containers():
    for path in K8S:
        for document in yaml.safe_load_all(path.read_text()):
            spec = document["spec"].get("template", {}).get("spec", {})
            yield from [*spec.get("initContainers", []), *spec.get("containers", [])]


def test_there_is_something_to_look_at():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.engine-cpu"]
    assert len(COMPOSE) == 4
    assert len(K8S) == 3


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_in_particular_and_is_checked(path):
    assert arguments(path, "USER") == ["10001:10001"]
    assert len(arguments(path, "HEALTHCHECK")) == 1
    assert all(json.loads(words) for words in arguments(path, "ENTRYPOINT") + arguments(path, "CMD"))
    (python,) = arguments(path, "ARG")
    assert re.fullmatch(r"PYTHON=3\.\d+\.\d+", python)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_let_through(path):
    let_through = {
        line[1:] for line in path.with_name(f"{path.name}.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = [name for rest in arguments(path, "COPY") if "--from" not in rest for name in rest.split()[:-1]]
    assert len(copied) > 5
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in let_through, name


def test_the_image_of_the_proxy_has_two_stages_and_no_installer():
    path = DOCKER / "Dockerfile"
    assert len(arguments(path, "FROM")) == 2
    assert "uninstall -y pip" in " ".join(arguments(path, "RUN"))
    (environment,) = [rest for rest in arguments(path, "ENV") if "FLEETGATE" in rest]
    names = re.findall(r"(FLEETGATE_\w+)=(\S+)", environment)
    values = {name.removeprefix("FLEETGATE_").lower(): value for name, value in names}
    assert Settings(**values).host == "0.0.0.0"


def test_without_a_token_the_image_refuses_to_start(monkeypatch):
    monkeypatch.setenv("FLEETGATE_HOST", "0.0.0.0")
    with pytest.raises(Exception, match="control-token"):
        load({})
    monkeypatch.setenv("FLEETGATE_CONTROL_TOKEN", "t")
    assert load({}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("file", "name", "service"), services(), ids=lambda item: item if isinstance(item, str) else ""
)
def test_a_service_is_pinned_and_reached_from_this_machine_only(file, name, service):
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), f"{file} {name}"
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), f"{file} {name}"
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert not source.startswith(".") or (DOCKER / source).exists(), source
    if "build" in service:
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("overlay", ["sim", "cpu", "gpu"])
def test_each_overlay_brings_the_engines_that_the_proxy_is_told_of(overlay):
    base = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    engines = yaml.safe_load((DOCKER / f"compose.{overlay}.yaml").read_text())["services"]
    told = base["proxy"]["environment"]["FLEETGATE_ENGINE"].split(",")
    assert [url.removeprefix("http://").removesuffix(":8000") for url in told] == list(engines)
    assert Settings(engine=told).engine == told


def test_only_settings_that_exist_are_set():
    known = {f"FLEETGATE_{name.upper()}" for name in Settings.model_fields}
    given = {name for _, _, service in services() for name in service.get("environment", {}) if name[:9] == "FLEETGATE"}
    given |= {item["name"] for each in containers() for item in each.get("env", []) if item["name"][:9] == "FLEETGATE"}
    assert given
    assert given - known == set()


def test_the_simulated_engines_are_started_with_arguments_that_exist():
    engine = yaml.safe_load((DOCKER / "compose.sim.yaml").read_text())["services"]["engine-0"]
    assert engine["entrypoint"] == ["python", "-m", "engine_launcher.sim"]
    assert sim_parser().parse_args(engine["command"]).port == 8000


def test_the_commands_of_probes_exist():
    commands = [
        each["startupProbe"]["exec"]["command"] for each in containers() if "exec" in each.get("startupProbe", {})
    ]
    assert commands == [["fleetgate", "status", "--json"]]
    command = main.get_command(None, "status")
    assert "--json" in [flag for option in command.params for flag in option.opts]
