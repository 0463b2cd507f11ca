"""``fleetgate engines``: start N engines, look after them, print their URLs, end them on Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from engine_launcher.errors import FAILURE_EXIT, LauncherError, UsageError
from engine_launcher.fleet import EngineFleet
from engine_launcher.options import Plan, fleet_options, plan
from engine_launcher.proxy_link import ApiRoster, FileRoster, NoRoster, ProxyLink, Roster
from engine_launcher.supervisor import Supervisor
from proxy.config import LogFormat, LogLevel
from proxy.observe import logs
from proxy.status import proxy_url
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.launcher")

REFRESH_PER_SECOND: Final = 2.0
"""How often the table of starting engines is drawn anew."""

PLAIN_INTERVAL: Final = 10.0
"""Seconds between two lines of progress where the output is no terminal."""

LAST_LINE_WIDTH: Final = 90
"""Characters of an engine's last log line that are shown while it starts."""


class Progress:
    """What the starting engines are doing: a live table in a terminal, a line now and then elsewhere (on stderr)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True)
        self._told = 0.0
        self._ready = 0
        self._over = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # An engine that is started again later has the log for its progress.
        self._over = True
        self._live.stop()

    def show(self, fleet: EngineFleet) -> None:
        """Called by the fleet at each look at an engine."""
        if self._over:
            return
        if self._console.is_terminal:
            self._live.update(self.table(fleet))
            return
        now, ready = time.monotonic(), sum(each.ready for each in fleet.engines)
        if ready > self._ready or now - self._told >= PLAIN_INTERVAL:
            self._told, self._ready = now, ready
            waited = now - min(each.started for each in fleet.engines)
            click.echo(f"{ready} of {len(fleet.engines)} engines ready after {waited:.0f} s", err=True)

    @staticmethod
    def table(fleet: EngineFleet) -> Table:
        """One row for each engine."""
        table = Table("engine", "url", "state", "seconds", "last line of its log", box=None)
        for each in fleet.engines:
            line = each.process.tail(1)[-LAST_LINE_WIDTH:]
            seconds = f"{time.monotonic() - each.started:.0f}"
            table.add_row(str(each.index), each.url, each.state, seconds, line)
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Who is told of the engines.

    Attributes:
        engines_file: a file that a proxy watches.
        register: URL of a proxy that is told through its API.
        proxy: URL of the proxy that drains them, where it is not the one of ``register``.
        control_token: of that proxy.
    """

    engines_file: Path | None = None
    register: str | None = None
    proxy: str | None = None
    control_token: str | None = None

    def link(self) -> ProxyLink | None:
        """The proxy, if there is one to ask."""
        url = self.register or self.proxy
        return None if url is None else ProxyLink(url, self.control_token)

    def roster(self, link: ProxyLink | None) -> Roster:
        """Where engines are written down; raises ``UsageError`` where two are named."""
        if self.register is not None and self.engines_file is not None:
            raise UsageError("--register and --engines-file both name the engines to a proxy; give one of them")
        if self.engines_file is not None:
            return FileRoster(self.engines_file)
        return ApiRoster(link) if self.register is not None and link is not None else NoRoster()


class Command:
    """The fleet, from its start to its end."""

    def __init__(self, wanted: Plan, where: Where) -> None:
        self._plan = wanted
        self._where = where
        self._asked = asyncio.Event()
        self._progress = Progress(Console(stderr=True))
        self._fleet = EngineFleet(wanted.fleet, on_progress=self._progress.show)
        self._supervisor: Supervisor | None = None

    def _on_signal(self) -> None:
        if self._asked.is_set():
            spawn(self._fleet.kill_all(), name="kill all engines")
        self._asked.set()

    def _on_roll(self) -> None:
        if self._supervisor is not None:
            spawn(rolled(self._supervisor), name="rolling restart")

    async def run(self) -> int:
        """Run until a signal, or until no engine is left; returns the exit code.

        A second signal ends the engines by force. Raises ``LauncherError`` when they do not start.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR1, self._on_roll)
        link = self._where.link()
        supervisor = Supervisor(self._fleet, self._plan.care, roster=self._where.roster(link), link=link)
        stop = spawn(self._asked.wait(), name="stop asked")
        work: asyncio.Task[Any] | None = None
        try:
            with self._progress:
                work = spawn(outcome(self._fleet.start()), name="start engines")
                await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return 0
            if (failed := work.result()) is not None:
                raise failed
            await supervisor.show()
            self._announce()
            self._supervisor = supervisor
            work = spawn(supervisor.run(), name="look after engines")
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                click.echo("fleetgate engines: no engine is left", err=True)
                return FAILURE_EXIT
            await supervisor.drain()
            return 0
        finally:
            for each in (work, stop):
                if each is not None:
                    each.cancel()
                    await asyncio.gather(each, return_exceptions=True)
            if any(each.process.alive for each in self._fleet.engines):
                click.echo("ending the engines", err=True)
            await self._fleet.stop()
            if self._supervisor is not None:
                await supervisor.leave()
            if link is not None:
                await link.close()

    def _announce(self) -> None:
        """Say on stdout where the engines are."""
        for url in self._fleet.urls:
            click.echo(url)
        sys.stdout.flush()
        click.echo(
            f"{len(self._fleet.urls)} engines ready; logs in {self._plan.fleet.log_dir}; Ctrl-C ends them", err=True
        )


async def outcome(work: Coroutine[Any, Any, None]) -> LauncherError | None:
    """The error that ``work`` ends with, as a value: an error of a task would be logged besides being reported."""
    try:
        await work
    except LauncherError as error:
        return error
    return None


async def rolled(supervisor: Supervisor) -> None:
    """A rolling restart whose end is said in the log."""
    failed = await outcome(supervisor.roll())
    if failed is not None:
        _log.error("rolling restart: %s", failed)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@fleet_options
@click.option("--host", default="127.0.0.1", help="Address that the engines listen on.")
@click.option("--port", type=int, help="Port of the first engine; the others follow. Free ports when left out.")
@click.option("--engines-file", type=click.Path(path_type=Path), help="File of URLs that a proxy watches.")
@click.option(
    "--register", metavar="URL", callback=proxy_url, help="A proxy that is told of the engines through its API."
)
@click.option(
    "--proxy", metavar="URL", callback=proxy_url, help="The proxy that drains engines, where --register is not given."
)
@click.option("--control-token", envvar="FLEETGATE_CONTROL_TOKEN", help="Control token of that proxy.")
@click.option("--log-format", type=click.Choice(list(LogFormat)), default=LogFormat.TEXT, help="One line a record.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def engines(context: click.Context, /, log_format: LogFormat, extra: tuple[str, ...], **options: Any) -> None:
    """Start COUNT engines and wait until all answer; EXTRA arguments after `--` go to each of them.

    Prints one URL a line on stdout when ready. An engine that dies, or no longer answers /health, is started again on
    its port, and comes back fenced. SIGUSR1 restarts all in turn, each drained first. Ctrl-C or SIGTERM drain them
    through the proxy, if there is one, and end every process of theirs. Exit codes: 0 clean stop, 2 bad usage or
    configuration, 1 anything else (an engine did not start, none is left, a port was taken).
    """
    where = Where(**{each.name: options.pop(each.name) for each in fields(Where)})
    logs.configure(LogFormat(log_format), LogLevel.INFO)

    async def run() -> int:
        return await Command(wanted, where).run()

    try:
        wanted = plan(context, options, host=options.pop("host"), port=options.pop("port"), extra=extra)
        code = asyncio.run(run())
    except LauncherError as error:
        click.echo(f"fleetgate engines: {error}", err=True)
        code = error.exit_code
    sys.exit(code)
