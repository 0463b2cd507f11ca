"""Settings of the proxy: a flag, an environment variable and a YAML key for each.

Where they come from is `proxy.sources`. Units are in the description; every limit says why it is there.
"""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from proxy.core.addresses import parse_engine_url, parse_engines_dns

ENV_PREFIX = "FLEETGATE_"

_LINK = re.compile(
    r"FLEETGATE(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_ADDR|_PORT|_PROTO)?)", re.ASCII
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes sets this variable in every pod beside a service whose name begins with ``fleetgate``.

    ``FLEETGATE_PORT`` is one if it holds a URL such as ``tcp://10.0.0.1:8000``, and a setting otherwise.
    """
    if variable.endswith("_PORT") and _LINK_VALUE.match(value):
        return True
    return _LINK.fullmatch(variable) is not None


class LogFormat(StrEnum):
    """How a log record is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe record that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Policy(StrEnum):
    """How the engine of a request is chosen."""

    STICKY = "sticky"
    LEAST_INFLIGHT = "least_inflight"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"
    PREFIX = "prefix"


class Labels(StrEnum):
    """Who labels an update that the trainer did not label; off: no marks of half-done ones either."""

    AUTO = "auto"
    OFF = "off"


class FanoutPath(BaseModel):
    """A further path that goes to every engine at once.

    Attributes:
        path: exact path, or a prefix when it ends with ``*``.
        rank_field: dotted name of the body field that holds the first rank of an engine, or None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    rank_field: str | None = None

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/") or value in {"/", "/*"}:
            raise ValueError(f"{value!r} must be a path such as /init_broadcaster or a prefix such as /areal_*")
        return value


def _comma_list(value: object) -> object:
    """Split at commas, in the items of a list too: a flag given once with two values must not be one odd value."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        items: list[object] = []
        for item in value:
            split = _comma_list(item) if isinstance(item, str) else [item]
            items += split if isinstance(split, list) else [split]
        return items
    return value


def _fanout_list(value: object) -> object:
    """Accept ``/path`` and ``/path=rank_field`` besides the mapping form."""
    items = _comma_list(value)
    if not isinstance(items, (list, tuple)):
        return items
    out: list[object] = []
    for item in items:
        if isinstance(item, str):
            path, _, field = item.partition("=")
            out.append({"path": path, "rank_field": field or None})
        else:
            out.append(item)
    return out


def _in_latin_1(text: str) -> bool:
    return all(ord(character) < 256 for character in text)


Urls = Annotated[list[str], NoDecode, BeforeValidator(_comma_list)]
Names = Annotated[list[str], NoDecode, BeforeValidator(_comma_list)]
FanoutPaths = Annotated[list[FanoutPath], NoDecode, BeforeValidator(_fanout_list)]


class Settings(BaseSettings):
    """All settings of the proxy."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    # Engines
    engine: Urls = Field([], description="Base URL of an engine; may be given several times.")
    engines_file: Path | None = Field(None, description="File with one engine URL a line; watched for changes.")
    engines_dns: str | None = Field(
        None,
        description="NAME:PORT whose addresses are the engines, or _http._tcp.NAME (srv:NAME) with SRV records.",
    )
    engines_dns_interval: float = Field(5.0, gt=0, description="Seconds between two resolutions of --engines-dns.")
    engine_api_key: SecretStr | None = Field(None, description="Sent to engines as a bearer token where none came.")
    engine_ca: Path | None = Field(None, description="PEM file with the CA that signs the engines' certificates.")
    allow_engines: Names = Field(
        ["127.0.0.1:*", "localhost:*", "[::1]:*"],
        description="HOST:PORT patterns that POST /fleet/engines may add; * matches anything.",
    )
    min_engines: int = Field(1, ge=1, description="Ready engines that /ready asks for.")

    # Listeners
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it.")
    control_host: str | None = Field(None, description="Address of the control listener; default: --host.")
    control_port: int | None = Field(
        None, ge=0, le=65535, description="Own port for control calls and /fleet writes; they leave the main port."
    )
    workers: int = Field(1, ge=1, le=64, description="Processes that share the port.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain of both listeners.")
    tls_key: Path | None = Field(None, description="PEM private key of --tls-cert.")

    # Who may do what
    control_token: SecretStr | None = Field(None, description="Bearer token for control calls and /fleet writes.")
    insecure_control: bool = Field(False, description="Allow control calls without a token off loopback.")
    allow_collective_rpc: bool = Field(False, description="Let POST /collective_rpc through (it runs any method).")
    trusted_proxies: Names = Field(
        ["127.0.0.0/8", "::1/128"], description="Networks whose X-Forwarded-* fields are kept and appended to."
    )

    # Balancing
    policy: Policy = Field(Policy.STICKY, description="How the engine of a request is chosen.")
    session_headers: Names = Field(["X-Session-ID", "X-SMG-Routing-Key"], description="Fields that carry a session.")
    session_ttl: float = Field(7200.0, gt=0, description="Seconds after which an unused session is forgotten.")
    max_sessions: int = Field(100_000, ge=1, description="Sessions remembered; the oldest is forgotten first.")
    session_body_fields: Names = Field(
        [], description="Body fields that carry a session where no header does, such as session_id or user."
    )
    session_live: float = Field(
        60.0, ge=0, description="Seconds after the start of a turn that a session counts as load of its engine."
    )
    affinity_margin: float = Field(
        1.25,
        ge=1,
        description="Sessions and prompts leave an engine that holds over this many times what others hold...",
    )
    affinity_slack: float = Field(
        2.0, ge=0, description="...plus this many per worker, so that small numbers do not move sessions."
    )
    slow_start: float = Field(
        0.0, ge=0, description="Seconds in which an engine that joins a busy fleet comes to its full share; 0: at once."
    )
    prefix_bytes: int = Field(
        32 << 10, ge=256, description="prefix: bytes of a prompt that are looked at, some 2 us for each KiB."
    )
    prefix_max_blocks: int = Field(
        400_000, ge=1, description="prefix: blocks of 256 prompt bytes remembered, some 200 bytes each."
    )
    prefix_min_match: float = Field(
        0.5, ge=0, le=1, description="prefix: share of a prompt that an engine must have cached to be preferred."
    )

    # The gate
    hold_timeout: float = Field(600.0, gt=0, description="Seconds a request is held at most.")
    max_held_requests: int = Field(16_384, ge=0, description="Requests held at once.")
    max_held_bytes: int = Field(1 << 30, ge=0, description="Bytes of bodies held at once.")
    hold_ping: float = Field(
        0.0,
        ge=0,
        description="Seconds between SSE comments to held streams; 0: none. The first one sends the answer's head, so "
        "that cannot name engine, weight version and attempts, and a refusal comes as an error event of a 200.",
    )
    pause_warn: float = Field(300.0, gt=0, description="Seconds after which a pause is logged and a gauge rises.")
    max_pause: float = Field(0.0, ge=0, description="Seconds after which the proxy resumes by itself; 0: never.")
    pause_watch_interval: float = Field(
        0.25, gt=0, description="Seconds between looks at an engine that someone else paused."
    )

    # Re-sending
    replay_limit: int = Field(
        64 << 20,
        ge=0,
        description="Bytes of a body kept so that it can be sent again, images of a rollout included; "
        "a bigger one is sent once, so its client sees a pause or an overload.",
    )
    max_attempts: int = Field(6, ge=1, description="Attempts of one request, pauses not counted.")
    retry_ratio: float = Field(0.2, ge=0, le=1, description="Re-sends allowed per request, over 10 s.")
    retry_floor: float = Field(10.0, ge=0, description="Re-sends a second always allowed.")
    backoff_base: float = Field(0.025, gt=0, description="Seconds of the first back-off; doubles, full jitter.")
    backoff_max: float = Field(2.0, gt=0, description="Seconds of the longest back-off.")
    max_retry_after: float = Field(30.0, ge=0, description="Seconds of an engine's Retry-After that are honoured.")

    # Towards engines
    connect_timeout: float = Field(5.0, gt=0, description="Seconds to open a connection to an engine.")
    first_byte_timeout: float = Field(0.0, ge=0, description="Seconds to an engine's first answer byte; 0: none.")
    read_timeout: float = Field(0.0, ge=0, description="Seconds between two bytes of an answer; 0: none.")
    engine_idle: float = Field(
        2.0, ge=0, description="Seconds an idle engine connection is kept (vLLM closes at 5); 0: none is kept."
    )
    down_timeout: float = Field(
        30.0, ge=0, description="Seconds that an engine is down until requests it has are given up; 0: never."
    )
    max_inflight: int = Field(0, ge=0, description="Requests at one engine at once; 0: no limit.")
    flood_window: float = Field(
        0.001,
        ge=0,
        le=0.1,
        description="Seconds within which pieces of a stream that come faster than this leave together; 0: never.",
    )
    peek_limit: int = Field(64 << 10, ge=1024, description="Bytes of a first event or error body looked at.")
    response_header_limit: int = Field(64 << 10, ge=1024, description="Bytes of an engine's response head.")

    # From clients
    max_connections: int = Field(65_536, ge=1, description="Client connections at once.")
    max_request_line: int = Field(8192, ge=256, description="Bytes of a request line.")
    max_header_line: int = Field(8192, ge=256, description="Bytes of one header line.")
    max_headers: int = Field(128, ge=8, description="Header fields of a request.")
    max_body: int = Field(0, ge=0, description="Bytes of a request body; 0: no limit.")
    max_control_body: int = Field(64 << 20, ge=1024, description="Bytes of a control call's body.")
    header_timeout: float = Field(10.0, gt=0, description="Seconds for a request head to arrive.")
    body_timeout: float = Field(30.0, gt=0, description="Seconds between two pieces of a request body.")
    client_idle: float = Field(75.0, gt=0, description="Seconds an idle client connection is kept.")
    stalled_client_timeout: float = Field(60.0, gt=0, description="Seconds a client may read nothing of its answer.")
    stream_buffer: int = Field(64 << 10, ge=1024, description="Bytes of an answer buffered for a slow client.")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get after SIGTERM.")

    # Control calls
    pause_timeout: float = Field(300.0, gt=0, description="Seconds for a leg of /pause (keep, abort).")
    pause_wait_timeout: float = Field(0.0, ge=0, description="Seconds for a leg of /pause?mode=wait; 0: none.")
    resume_timeout: float = Field(300.0, gt=0, description="Seconds for a leg of /resume.")
    transfer_timeout: float = Field(1800.0, gt=0, description="Seconds for a leg of init and update calls.")
    control_timeout: float = Field(60.0, gt=0, description="Seconds for a leg of any other control call.")
    replay_window: float = Field(
        5.0, ge=0, description="Seconds in which the same life-cycle call again gets the first one's answer."
    )
    label_updates: Labels = Field(
        Labels.AUTO,
        description="Who labels an update that the trainer did not label; with off, half-done ones get no mark either.",
    )
    require_pause: bool = Field(False, description="Refuse weight updates while the gate is open.")
    fanout_paths: FanoutPaths = Field([], description="Further paths (or prefix*) that go to every engine.")

    # Probes
    probe_interval: float = Field(2.0, gt=0, description="Seconds between two probes of an engine, +-10 %.")
    probe_timeout: float = Field(2.0, gt=0, description="Seconds for one probe.")
    probe_fall: int = Field(3, ge=1, description="Failed probes in a row until an engine is down.")
    probe_rise: int = Field(1, ge=1, description="Good probes in a row until an engine that was down is looked at.")

    # Engines that break requests
    outlier_failures: int = Field(
        5, ge=0, description="Broken requests in a row after which an engine is left out for a while; 0: never."
    )
    outlier_seconds: float = Field(
        30.0,
        gt=0,
        description="Seconds an engine is left out the first time; doubles, 300 at most, half of them at most.",
    )

    # Logs
    log_format: LogFormat = Field(LogFormat.TEXT, description="One line a record: text or json.")
    log_level: LogLevel = Field(LogLevel.INFO, description="Least severe record that is written.")
    access_log: bool = Field(False, description="One record a request.")
    otel: bool | None = Field(
        None,
        description="OpenTelemetry spans (fleetgate[otel]); unset: if OTEL_EXPORTER_OTLP_ENDPOINT names a collector.",
    )

    @field_validator("engine", mode="after")
    @classmethod
    def _engines(cls, value: list[str]) -> list[str]:
        urls = [parse_engine_url(item) for item in value]
        for url in urls:
            if urls.count(url) > 1:
                raise ValueError(f"engine {url} is given twice")
        return urls

    @field_validator("control_token", "engine_api_key", mode="after")
    @classmethod
    def _secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        text = value.get_secret_value()
        # An empty one protects nothing while it looks set: everybody can send no token.
        if not text.strip():
            raise ValueError("it is empty; give a secret, or leave it out")
        if text != text.strip() or not text.isprintable() or not _in_latin_1(text):
            raise ValueError(
                "no Authorization field can carry it; give printable Latin-1 text without white space around it"
            )
        return value

    @field_validator("engines_dns", mode="after")
    @classmethod
    def _dns(cls, value: str | None) -> str | None:
        if value is not None:
            parse_engines_dns(value)
        return value

    @field_validator("trusted_proxies", mode="after")
    @classmethod
    def _networks(cls, value: list[str]) -> list[str]:
        for item in value:
            ipaddress.ip_network(item)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment; the file is laid under both by `proxy.sources.load`."""
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {
            name: value
            for name, value in env_settings.env_vars.items()
            if value is None or not is_service_link(name.upper(), value)
        }
        return (init_settings, env_settings)
