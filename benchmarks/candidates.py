"""What is measured: fleetgate and its peers, each with one worker or thread, buffering off where there is a choice.

The routers run with their own default policy, which looks at prompts (cache-aware); vllm-router also once more with
round robin, its cheapest.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import procs

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".bench" / "bin"
READY_WITHIN = 60.0
"""Seconds until a proxy has to answer through an engine."""
MANY = 60_000
"""Where a peer has a limit of connections or requests, it is put above what any scenario needs."""

ENVOY = "type.googleapis.com/envoy.extensions.filters"

Command = Callable[[int, list[str], Path], list[str]]


@dataclass(frozen=True)
class Candidate:
    """A proxy that can be measured.

    Attributes:
        name: as the tables show it.
        command: makes its command line from a port, engine URLs and a folder for files.
        needs: program that must be there.
        ours: it is fleetgate, so that it has a gate and a control plane.
    """

    name: str
    command: Command
    needs: str
    env: dict[str, str] = field(default_factory=dict)
    ours: bool = False

    def missing(self) -> str | None:
        """Why it cannot be measured here, or None."""
        if shutil.which(self.needs) is None:
            return f"{self.needs} is not installed"
        return None


def _hosts(engines: list[str]) -> list[str]:
    return [url.removeprefix("http://") for url in engines]


def _nginx(port: int, engines: list[str], folder: Path) -> list[str]:
    servers = "\n".join(f"    server {host} max_fails=0;" for host in _hosts(engines))
    user = "user root;" if os.geteuid() == 0 else ""
    text = f"""
{user}
worker_processes 1;
worker_rlimit_nofile {procs.WANTED_FILES};
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.err error;
events {{ worker_connections {MANY}; multi_accept on; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 0;
  client_body_buffer_size 16k;
  keepalive_requests 1000000000;
  upstream engines {{
{servers}
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      proxy_set_header X-Request-Id $request_id;
      proxy_buffering off;
      proxy_read_timeout 1h;
      proxy_send_timeout 1h;
    }}
  }}
}}
"""
    config = folder / "nginx.conf"
    config.write_text(text, encoding="utf-8")
    return ["nginx", "-c", str(config), "-p", str(folder)]


def _haproxy(port: int, engines: list[str], folder: Path) -> list[str]:
    servers = "\n".join(f"  server e{i} {host}" for i, host in enumerate(_hosts(engines)))
    most = procs.most_open()
    text = f"""
global
  nbthread 1
  maxconn {most}
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  option http-keep-alive
  option forwardfor
frontend front
  bind 127.0.0.1:{port} backlog 4096
  default_backend engines
backend engines
  balance roundrobin
  http-reuse always
{servers}
"""
    config = folder / "haproxy.cfg"
    config.write_text(text, encoding="utf-8")
    return ["haproxy", "-f", str(config), "-db"]


def _envoy(port: int, engines: list[str], folder: Path) -> list[str]:
    def address(host: str) -> dict[str, object]:
        name, _, number = host.rpartition(":")
        return {"address": {"socket_address": {"address": name, "port_value": int(number)}}}

    manager = {
        "@type": f"{ENVOY}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "codec_type": "HTTP1",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{ENVOY}.http.router.v3.Router"},
            }
        ],
    }
    listener = {
        "name": "front",
        "tcp_backlog_size": 4096,
        **address(f"127.0.0.1:{port}"),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    limits = {"max_connections": MANY, "max_pending_requests": MANY, "max_requests": MANY}
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": [{"endpoint": address(host)} for host in _hosts(engines)]}],
        },
    }
    config = folder / "envoy.json"
    config.write_text(
        json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}), encoding="utf-8"
    )
    base = str(port % 30_000)
    return [str(PEERS / "envoy"), "-c", str(config), "--concurrency", "1", "--base-id", base, "-l", "error"]


def _vllm_router(*extra: str) -> Command:
    def command(port: int, engines: list[str], _folder: Path) -> list[str]:
        metrics = str(procs.free_port())
        return [
            str(PEERS / "vllm-router"),
            *("--worker-urls", *engines, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"),
            *("--max-concurrent-requests", str(MANY), "--request-timeout-secs", "3600"),
            *("--prometheus-port", metrics, "--prometheus-host", "127.0.0.1", *extra),
        ]

    return command


def _sglang_router(port: int, engines: list[str], _folder: Path) -> list[str]:
    metrics = str(procs.free_port())
    return [
        str(PEERS / "sglang-router"),
        *("launch", "--worker-urls", *engines, "--host", "127.0.0.1", "--port", str(port)),
        *("--log-level", "error", "--request-timeout-secs", "3600"),
        *("--max-concurrent-requests", str(MANY), "--prometheus-port", metrics, "--prometheus-host", "127.0.0.1"),
    ]


def _plain_aiohttp(port: int, engines: list[str], _folder: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("plain_aiohttp.py")), str(port), *engines]


def _fleetgate(*extra: str) -> Command:
    def command(port: int, engines: list[str], _folder: Path) -> list[str]:
        flags = [part for url in engines for part in ("--engine", url)]
        return [sys.executable, "-m", "proxy", "--port", str(port), *flags, "--log-level", "warning", *extra]

    return command


ONE_THREAD = {"TOKIO_WORKER_THREADS": "1"}

FLEETGATE = Candidate("fleetgate", _fleetgate(), sys.executable, ours=True)
ALL = (
    FLEETGATE,
    Candidate("nginx", _nginx, "nginx"),
    Candidate("haproxy", _haproxy, "haproxy"),
    Candidate("envoy", _envoy, str(PEERS / "envoy")),
    Candidate("vllm-router", _vllm_router(), str(PEERS / "vllm-router"), ONE_THREAD),
    Candidate("vllm-router rr", _vllm_router("--policy", "round_robin"), str(PEERS / "vllm-router"), ONE_THREAD),
    Candidate("sglang-router", _sglang_router, str(PEERS / "sglang-router"), ONE_THREAD),
    Candidate("plain aiohttp", _plain_aiohttp, sys.executable),
)


def fleetgate_with(*flags: str, name: str = "fleetgate") -> Candidate:
    """Fleetgate with further flags."""
    return Candidate(name, _fleetgate(*flags), sys.executable, ours=True)


def custom(spec: str) -> Candidate:
    """A candidate from ``NAME=COMMAND`` with the places ``{port}`` and ``{engines}`` (``--engine URL`` each).

    A name that ends in ``*`` says that it is a fleetgate, with a gate and a control plane.
    """
    name, _, text = spec.partition("=")

    def command(port: int, engines: list[str], _folder: Path) -> list[str]:
        flags = " ".join(f"--engine {url}" for url in engines)
        return shlex.split(text.format(port=port, engines=flags))

    return Candidate(name.rstrip("*"), command, shlex.split(text)[0], ours=name.endswith("*"))


@dataclass
class Running:
    """A candidate in front of engines."""

    candidate: Candidate
    port: int
    process: procs.Process
    started: float
    ready: float = 0.0
    """Seconds from its start to its first answer from an engine."""

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return self.process.pids

    def stop(self) -> None:
        """End it."""
        self.process.stop()


_PROBE = b'{"model":"bench","prompt":"p","max_tokens":1,"user":"bench n=1 us=0 size=1024 delay=0 hold=0"}'


def launch(candidate: Candidate, engines: list[str], folder: Path) -> Running:
    """Start a candidate and wait until a request comes back from an engine.

    Raises:
        BenchError: it does not answer.
    """
    port = procs.free_port()
    place = folder / f"{candidate.name.replace(' ', '-')}-{port}"
    place.mkdir(parents=True)
    command = candidate.command(port, engines, place)
    started = time.monotonic()
    process = procs.start(command, core=procs.PROXY_CORE, log=place / "log", env=candidate.env, cwd=ROOT)
    running = Running(candidate, port, process, started)
    while True:
        try:
            if procs.http(port, "POST", "/v1/completions", _PROBE, timeout=5)[0] == 200:
                running.ready = time.monotonic() - started
                return running
        except OSError:
            pass
        if process.popen.poll() is not None or time.monotonic() - started > READY_WITHIN:
            running.stop()
            raise procs.BenchError(f"{candidate.name} did not get ready: {process.tail()}")
        time.sleep(0.01)
