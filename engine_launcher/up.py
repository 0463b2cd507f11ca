"""``fleetgate up``: engines and the proxy in front of them as one supervised unit.

The engines start first; the proxy is a process of its own, so that it has its event loop to itself and ``--workers``
works. SIGTERM or Ctrl-C drain the proxy, then end the engines. A second signal ends everything by force.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.console import Console

from engine_launcher.cli import Progress, rolled
from engine_launcher.cpu_transfer import TIMEOUT_VARIABLE
from engine_launcher.errors import FAILURE_EXIT, LauncherError, PortTakenError
from engine_launcher.fleet import EngineFleet
from engine_launcher.options import Plan, fleet_options, plan
from engine_launcher.ports import free_ports
from engine_launcher.process import GUARD
from engine_launcher.proxy_link import FileRoster, ProxyLink
from engine_launcher.supervisor import Supervisor
from engine_launcher.vllm_engine import VLLM_VARIABLE
from proxy.cli import read_settings, setting_options
from proxy.config import ENV_PREFIX, Settings
from proxy.observe import logs
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.up")

ENGINE_HOST: Final = "127.0.0.1"
"""Engines listen here only: whoever could reach one directly would pass by the gate and the control token."""

ENGINES_FILE: Final = "engines"
"""In the directory of the logs: where the engines are, for the proxy and for people."""

OWN_SETTINGS: Final = frozenset({"engine", "engines_file", "engines_dns", "engines_dns_interval"})
"""Settings of the proxy that are no flags here: this command knows where the engines are."""

PROXY_EXTRA: Final = 10.0
"""Seconds beyond the drain time after which the proxy is taken to be stuck and is killed."""


class ProxyProcess:
    """The proxy as a child under the guard; its records go to this command's own standard error."""

    def __init__(self, environment: Mapping[str, str], grace: float) -> None:
        self._environment = environment
        self._grace = grace
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it in a session of its own: Ctrl-C in a terminal reaches the supervisor alone."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", GUARD, str(self._grace), "-", "0", "0", sys.executable, "-m", "proxy"),
            stdin=asyncio.subprocess.PIPE,
            env=dict(self._environment),
            start_new_session=True,
        )

    async def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Drain and end it; with SIGUSR1 at once. Fine when it has ended or was never started."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signum)
            await self._process.wait()


class Unit:
    """Runs engines and a proxy until a signal, or until either is gone.

    Args:
        wanted: the engines, and how they are looked after.
        settings: of the proxy.
        environment: of the proxy's process, its engines left out.
    """

    def __init__(self, wanted: Plan, settings: Settings, environment: Mapping[str, str]) -> None:
        self._plan = wanted
        self._settings = settings
        self._asked = asyncio.Event()
        self._progress = Progress(Console(stderr=True))
        self._fleet = EngineFleet(wanted.fleet, on_progress=self._progress.show)
        self._file = wanted.fleet.log_dir.absolute() / ENGINES_FILE
        known = {"ENGINES_FILE": str(self._file), "PORT": str(port_of(settings.host, settings.port))}
        if settings.control_port is not None:
            known["CONTROL_PORT"] = str(port_of(settings.control_host or settings.host, settings.control_port))
        self._link = link_to(settings, int(known.get("CONTROL_PORT", known["PORT"])))
        self._proxy = ProxyProcess(
            {**environment, **{ENV_PREFIX + name: value for name, value in known.items()}},
            settings.drain_timeout + PROXY_EXTRA,
        )
        self._supervisor = Supervisor(self._fleet, wanted.care, roster=FileRoster(self._file), link=self._link)
        self._serving = False

    def _on_signal(self) -> None:
        if self._asked.is_set():
            _log.warning("a second signal: everything is ended by force")
            spawn(self._kill(), name="kill")
        self._asked.set()

    def _on_roll(self) -> None:
        if self._serving:
            spawn(rolled(self._supervisor), name="rolling restart")

    async def _kill(self) -> None:
        await self._proxy.stop(signal.SIGUSR1)
        await self._fleet.kill_all()

    async def run(self) -> int:
        """Returns the exit code; raises ``LauncherError`` when the engines do not start."""
        check_port(self._settings.host, self._settings.port)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR1, self._on_roll)
        stop = spawn(self._asked.wait(), name="stop asked")
        work = spawn(self._work(), name="engines and proxy")
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                _log.info("stopping: the proxy drains, then the engines end")
                return 0
            return work.result()
        finally:
            for each in (work, stop):
                each.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            # The proxy first: what its clients still wait for is in the engines.
            await self._proxy.stop()
            await self._fleet.stop()
            await self._link.close()
            self._file.unlink(missing_ok=True)
            _log.info("all engines have ended")

    async def _work(self) -> int:
        with self._progress:
            await self._fleet.start()
        _log.info("%d engines answer; their logs are in %s", len(self._fleet.urls), self._plan.fleet.log_dir)
        await self._supervisor.show()
        await self._proxy.start()
        self._serving = True
        proxy: asyncio.Task[Any] = spawn(self._proxy.wait(), name="proxy")
        engines_gone: asyncio.Task[Any] = spawn(self._supervisor.run(), name="look after engines")
        try:
            await asyncio.wait({proxy, engines_gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            engines_gone.cancel()
            await asyncio.wait({engines_gone})
        if proxy.done():
            _log.error("the proxy ended by itself with exit code %d; the engines are ended too", proxy.result())
            return proxy.result() or FAILURE_EXIT
        _log.error("no engine is left; the proxy is ended too")
        return FAILURE_EXIT


def port_of(host: str, port: int) -> int:
    """The port itself, or a free one for 0: the launcher has to know where its proxy listens."""
    return port or free_ports(host, 1)[0]


def link_to(settings: Settings, port: int) -> ProxyLink:
    """The control plane of a proxy on this machine."""
    host = settings.host if settings.control_port is None else settings.control_host or settings.host
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    near = f"[{near}]" if ":" in near else near
    token = settings.control_token.get_secret_value() if settings.control_token is not None else None
    scheme = "https" if settings.tls_cert is not None else "http"
    # Its own child on this machine: the certificate is for the name that clients use.
    return ProxyLink(f"{scheme}://{near}:{port}", token, verify=False)


def check_port(host: str, port: int) -> None:
    """Raise ``PortTakenError`` when the proxy could not listen: better now than after minutes of starting engines."""
    if port == 0:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortTakenError(
            f"the proxy cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0 for a free one"
        ) from None


def own_variables(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Take out the variables that are the launcher's, for the engines: the proxy refuses what it does not know."""
    return {name: environ.pop(name) for name in (VLLM_VARIABLE, TIMEOUT_VARIABLE) if name in environ}


def proxy_environment(options: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the proxy: flags as the variables that they beat.

    A flag must not become an argument of the child, because every user of the machine can read arguments, and a token
    is among them.
    """
    found = dict(base)
    for name, value in options.items():
        if value is None or value == ():
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        found[ENV_PREFIX + name.upper()] = text
    return found


def with_file(options: dict[str, Any], section: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Settings of the proxy: its section of the fleet file under what was given by flag or environment variable."""
    merged = dict(options)
    for name, value in section.items():
        if name in given:
            continue
        merged[name] = tuple(map(_plain, value)) if isinstance(value, list) else value
    return merged


def _plain(item: Any) -> Any:
    """A further fan-out path in the form that a flag has."""
    if isinstance(item, dict) and "path" in item:
        return item["path"] + (f"={item['rank_field']}" if item.get("rank_field") else "")
    return item


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@fleet_options
@click.option("--engine-port", type=int, help="Port of the first engine; the others follow. Free ports when left out.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def up(context: click.Context, /, engine_port: int | None, extra: tuple[str, ...], **options: Any) -> None:
    """Start COUNT engines and the proxy in front of them; EXTRA arguments after `--` go to each engine.

    Examples: fleetgate up --model ./model --count 2 --port 8000 -- --max-model-len 8192;  fleetgate up -c fleet.yaml

    Takes the settings of `fleetgate proxy` too, besides those that say where engines are; in a fleet file they are the
    section `proxy`. An engine that dies, or no longer answers /health, is started again on its port, and comes back
    fenced. SIGUSR1 restarts all engines in turn, each drained first. SIGTERM or Ctrl-C drain the proxy, then end the
    engines. Exit codes: 0 clean stop, 2 bad usage or configuration, 1 anything else (no engine came up or is left, a
    port was taken, the proxy died).
    """
    own = own_variables(os.environ)
    try:
        wanted = plan(context, options, host=ENGINE_HOST, port=engine_port, extra=extra, environment=own)
        given = {
            name
            for name in Settings.model_fields
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
            or ENV_PREFIX + name.upper() in os.environ
        }
        options = with_file(options, wanted.proxy, given)
        settings = read_settings(dict(options))
        logs.configure(settings.log_format, settings.log_level)

        async def run() -> int:
            return await Unit(wanted, settings, proxy_environment(options, os.environ)).run()

        code = asyncio.run(run())
    except LauncherError as error:
        click.echo(f"fleetgate up: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


setting_options(up)
up.params = [each for each in up.params if each.name not in OWN_SETTINGS]
