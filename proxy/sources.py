"""Where settings come from: flags, then the environment, then a YAML file.

A key that does not exist is an error that names the nearest one that does; what would be unsafe is refused.
"""

from __future__ import annotations

import difflib
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from proxy import extras
from proxy.config import ENV_PREFIX, Settings, is_service_link
from proxy.core.addresses import is_loopback, overlap

LAUNCHER_VARIABLES = frozenset({"FLEETGATE_VLLM", "FLEETGATE_TRANSFER_TIMEOUT", "FLEETGATE_REQUIRE_VLLM"})
"""Variables of the launcher and the tests, which share the prefix and are none of the proxy's business."""


class ConfigError(Exception):
    """The configuration is wrong; the message says what and what would be right."""


def nearest(name: str, known: list[str]) -> str:
    """A hint that names the known key most like ``name``, however far it is."""
    lower = {each.lower(): each for each in known}
    match = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.0)
    return f"; did you mean {lower[match[0]]}?" if match else ""


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping of settings, such as 'port: 8000'")
    _check_once(path, node)
    known = list(Settings.model_fields)
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name == "config":
            raise ConfigError(f"{path}: {key!r} names a file of settings and cannot stand in one; use --config")
        if name not in Settings.model_fields:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, known)}")
        out[name] = value
    return out


def _check_once(path: Path, node: yaml.Node | None) -> None:
    """Of two values for one setting YAML would take the last without a word."""
    seen: dict[str, str] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            name = key.value.replace("-", "_")
            if name in seen:
                both = "twice" if seen[name] == key.value else f"twice, as {seen[name]} and as {key.value}"
                raise ConfigError(f"{path}: {name} is given {both}; keep one of them")
            seen[name] = key.value


def _check_env(environ: Mapping[str, str]) -> set[str]:
    known = {ENV_PREFIX + name.upper(): name for name in Settings.model_fields}
    known[ENV_PREFIX + "CONFIG"] = "config"
    given: set[str] = set()
    for variable, value in environ.items():
        if not variable.upper().startswith(ENV_PREFIX) or is_service_link(variable.upper(), value):
            continue
        if variable.upper() in LAUNCHER_VARIABLES:
            continue
        if variable.upper() not in known:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable.upper(), list(known))}")
        given.add(known[variable.upper()])
    return given


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Settings from flags, the environment and a file, in this order of strength.

    Args:
        flags: settings that were given on the command line, by field name.
        config: a YAML file; default ``FLEETGATE_CONFIG``.

    Raises:
        ConfigError: an unknown key, a wrong value or an unsafe combination.
    """
    from_env = _check_env(os.environ)
    named = next((value for name, value in os.environ.items() if name.upper() == f"{ENV_PREFIX}CONFIG"), "")
    if config is None and named:
        config = Path(named)
    merged = _read_file(config) if config is not None else {}
    merged = {key: value for key, value in merged.items() if key not in from_env}
    merged.update(flags)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from None
    check_safety(settings)
    _check_tls(settings)
    return settings


def _explain(item: Any) -> str:
    name = "_".join(str(part) for part in item["loc"][:1]) or "settings"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{name.replace('_', '-')}: {message}"


def check_safety(settings: Settings) -> None:
    """Refuse what would leave the control plane open to the network, and settings that cannot be together.

    Raises:
        ConfigError: control calls could be made from another machine without a credential, or two settings clash.
    """
    host = settings.host if settings.control_port is None else (settings.control_host or settings.host)
    if not is_loopback(host) and settings.control_token is None and not settings.insecure_control:
        raise ConfigError(
            f"control calls on {host} would be open to everybody: set --control-token, "
            "keep the listener on 127.0.0.1, or insist with --insecure-control"
        )
    if settings.control_port and settings.control_port == settings.port and overlap(host, settings.host):
        raise ConfigError(f"--port and --control-port are both {settings.port}; give each its own, or leave one out")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    if settings.otel and not extras.otel_installed():
        raise ConfigError(f"--otel needs OpenTelemetry: {extras.OTEL_INSTALL}")


def _check_tls(settings: Settings) -> None:
    """Try the files now: found out later, one would end the proxy at its start, or keep every engine down.

    Raises:
        ConfigError: one cannot be read, or holds something else.
    """
    for name in ("tls_cert", "tls_key", "engine_ca"):
        path: Path | None = getattr(settings, name)
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: cannot read {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if settings.tls_cert is not None and settings.tls_key is not None:
        try:
            # With a passphrase it would ask a terminal that nobody looks at.
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} are not a PEM certificate "
                f"and its key ({error.reason or error})"
            ) from None
    if settings.engine_ca is not None:
        try:
            context.load_verify_locations(settings.engine_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"--engine-ca {settings.engine_ca} holds no PEM certificate ({error.reason})") from None
