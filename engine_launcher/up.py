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
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from engine_launcher.cli import Progress
from engine_launcher.cpu_transfer import TIMEOUT_VARIABLE
from engine_launcher.errors import FAILURE_EXIT, LauncherError, PortTakenError
from engine_launcher.fleet import Engine, EngineFleet
from engine_launcher.process import GUARD
from engine_launcher.settings import READY_WAIT, STOP_GRACE, FleetSpec
from engine_launcher.vllm_engine import VLLM_VARIABLE
from proxy.cli import read_settings, setting_options
from proxy.config import ENV_PREFIX, Settings
from proxy.observe import logs
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.up")

ENGINE_HOST: Final = "127.0.0.1"
"""Engines listen here only: whoever could reach one directly would pass by the gate and the control token."""

ENGINE_OPTIONS: Final = ("model", "count", "kind", "log_dir", "vllm", "ready_wait", "stop_grace", "seed", "extra")
"""Flags that are fields of ``FleetSpec``."""

OWN_SETTINGS: Final = frozenset({"engine", "engines_file", "engines_dns", "engines_dns_interval"})
"""Settings of the proxy that are no flags here: this command knows where the engines are."""

PROXY_EXTRA: Final = 10.0
"""Seconds beyond the drain time after which the proxy is taken to be stuck and is killed."""

RESTART_DELAY: Final = 2.0
"""Seconds between an engine's death and its restart, so that one that dies at once does not spin."""


class ProxyProcess:
    """The proxy as a child under the guard; its records go to this command's own standard error."""

    def __init__(self, environment: Mapping[str, str], grace: float) -> None:
        self._environment = environment
        self._grace = grace
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it in a session of its own: Ctrl-C in a terminal reaches the supervisor alone."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", GUARD, str(self._grace), sys.executable, "-m", "proxy"),
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


class Supervisor:
    """Runs engines and a proxy until a signal, or until either is gone.

    Args:
        spec: the engines.
        settings: of the proxy.
        environment: of the proxy's process, its engines left out.
        restarts: how often an engine that died is started again.
    """

    def __init__(self, spec: FleetSpec, settings: Settings, environment: Mapping[str, str], restarts: int) -> None:
        self._log_dir = spec.log_dir
        self._settings = settings
        self._environment = environment
        self._restarts = restarts
        self._asked = asyncio.Event()
        self._progress = Progress(Console(stderr=True))
        self._fleet = EngineFleet(spec, on_progress=self._progress.show)
        self._proxy: ProxyProcess | None = None

    def _on_signal(self) -> None:
        if self._asked.is_set():
            _log.warning("a second signal: everything is ended by force")
            spawn(self._kill(), name="kill")
        self._asked.set()

    async def _kill(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop(signal.SIGUSR1)
        await self._fleet.kill_all()

    async def run(self) -> int:
        """Returns the exit code; raises ``LauncherError`` when the engines do not start."""
        check_port(self._settings.host, self._settings.port)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
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
            if self._proxy is not None:
                await self._proxy.stop()
            await self._fleet.stop()
            _log.info("all engines have ended")

    async def _work(self) -> int:
        with self._progress:
            await self._fleet.start()
        _log.info("%d engines answer; their logs are in %s", len(self._fleet.urls), self._log_dir)
        engines = {ENV_PREFIX + "ENGINE": ",".join(self._fleet.urls)}
        self._proxy = ProxyProcess({**self._environment, **engines}, self._settings.drain_timeout + PROXY_EXTRA)
        await self._proxy.start()
        proxy: asyncio.Task[Any] = spawn(self._proxy.wait(), name="proxy")
        engines_gone: asyncio.Task[Any] = spawn(self._watch_all(), name="watch engines")
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

    async def _watch_all(self) -> None:
        await asyncio.gather(*(self._watch(each) for each in self._fleet.engines))

    async def _watch(self, engine: Engine) -> None:
        """Until an engine is dead for good. The proxy notices a death by itself and serves on the others."""
        left = self._restarts
        while True:
            code = await engine.process.wait()
            log = engine.process.log
            _log.error(
                "%s ended with exit code %s; see %s, which ends with: %s", engine.process.name, code, log, _last(engine)
            )
            if not left:
                return
            left -= 1
            await asyncio.sleep(RESTART_DELAY)
            _log.info("starting %s again; it gets no requests before its weights are known", engine.process.name)
            try:
                await self._fleet.restart(engine.index)
            except LauncherError as error:
                _log.error("%s", str(error).partition("\n")[0])
                await engine.process.stop()


def _last(engine: Engine) -> str:
    return engine.process.tail(1).strip() or "(nothing)"


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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(path_type=Path), help="Directory of the model; for sim, the name to serve.")
@click.option("--count", type=int, default=1, show_default=True, help="How many engines to start.")
@click.option(
    "--kind",
    type=click.Choice(["vllm", "sim"]),
    default="vllm",
    show_default=True,
    help="Real vLLM, or the simulated engine.",
)
@click.option("--engine-port", type=int, help="Port of the first engine; the others follow. Free ports when left out.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path(".run/engines"),
    show_default=True,
    help="Directory of the engines' logs.",
)
@click.option(
    "--vllm",
    type=click.Path(path_type=Path),
    envvar=VLLM_VARIABLE,
    help="Python executable or virtual environment that has vLLM; else FLEETGATE_VLLM, else what `make engine` built.",
)
@click.option("--ready-wait", type=float, default=READY_WAIT, show_default=True, help="Seconds until all must answer.")
@click.option(
    "--stop-grace",
    type=float,
    default=STOP_GRACE,
    show_default=True,
    help="Seconds between SIGTERM and SIGKILL of an engine at the end.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the simulated engine's weights.")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often an engine that died is started again.",
)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def up(engine_port: int | None, restarts: int, **options: Any) -> None:
    """Start COUNT engines and the proxy in front of them; EXTRA arguments after `--` go to each engine.

    Example: fleetgate up --model ./model --count 2 --port 8000 -- --max-model-len 8192

    Takes the settings of `fleetgate proxy` too, besides those that say where engines are. SIGTERM or Ctrl-C drain the
    proxy, then end the engines. An engine that dies is logged, and the others go on. Exit codes: 0 clean stop, 2 bad
    usage or configuration, 1 anything else (no engine came up or is left, a port was taken, the proxy died).
    """
    engines = {name: options.pop(name) for name in ENGINE_OPTIONS}
    own = own_variables(os.environ)
    settings = read_settings(dict(options))
    logs.configure(settings.log_format, settings.log_level)
    spec = FleetSpec(host=ENGINE_HOST, port=engine_port, environment=own, **engines)

    async def run() -> int:
        return await Supervisor(spec, settings, proxy_environment(options, os.environ), restarts).run()

    try:
        code = asyncio.run(run())
    except LauncherError as error:
        click.echo(f"fleetgate up: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


setting_options(up)
up.params = [each for each in up.params if each.name not in OWN_SETTINGS]
