"""``fleetgate engines``: start N engines, print their URLs when all answer, end them on Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, Self

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from engine_launcher.errors import LauncherError
from engine_launcher.fleet import EngineFleet
from engine_launcher.settings import READY_WAIT, STOP_GRACE, FleetSpec
from proxy.tasks import spawn

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

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, fleet: EngineFleet) -> None:
        """Called by the fleet at each look at an engine."""
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


async def serve(spec: FleetSpec, engines_file: Path | None) -> int:
    """Run the fleet until a signal or a death; returns the exit code. A second signal ends the engines by force."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    with Progress(Console(stderr=True)) as progress:
        fleet = EngineFleet(spec, on_progress=progress.show)

        def on_signal() -> None:
            if asked.is_set():
                spawn(fleet.kill_all(), name="kill all engines")
            asked.set()

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, on_signal)
        stop = spawn(asked.wait(), name="stop asked")
        try:
            start = spawn(outcome(fleet.start()), name="start engines")
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                await asyncio.wait({start})
                return 0
            if (failed := start.result()) is not None:
                raise failed
            progress.__exit__()
            announce(fleet, engines_file)
            death = spawn(fleet.first_death(), name="watch engines")
            await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                raise death.result().died()
            death.cancel()
            return 0
        finally:
            stop.cancel()
            progress.__exit__()
            if any(each.process.alive for each in fleet.engines):
                click.echo("ending the engines", err=True)
            await fleet.stop()


async def outcome(work: Coroutine[Any, Any, None]) -> LauncherError | None:
    """The error that ``work`` ends with, as a value: an error of a task would be logged besides being reported."""
    try:
        await work
    except LauncherError as error:
        return error
    return None


def announce(fleet: EngineFleet, engines_file: Path | None) -> None:
    """Say on stdout where the engines are, and write the file that a proxy watches."""
    if engines_file is not None:
        fleet.write_urls(engines_file)
    for url in fleet.urls:
        click.echo(url)
    sys.stdout.flush()
    click.echo(f"{len(fleet.urls)} engines ready; logs in {fleet.spec.log_dir}; Ctrl-C ends them", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path), help="Directory of the model; for sim, the name to serve.")
@click.option("--count", type=int, default=1, help="How many engines to start.")
@click.option("--kind", type=click.Choice(["vllm", "sim"]), default="vllm", help="Real vLLM, or the simulated engine.")
@click.option("--host", default="127.0.0.1", help="Address that the engines listen on.")
@click.option("--port", type=int, help="Port of the first engine; the others follow. Free ports when left out.")
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path(".run/engines"), help="Directory of the logs.")
@click.option(
    "--vllm",
    "--python",
    "vllm",
    type=click.Path(path_type=Path),
    help="Python executable or virtual environment that has vLLM; else FLEETGATE_VLLM, else what `make engine` built.",
)
@click.option("--engines-file", type=click.Path(path_type=Path), help="Write the URLs there, one a line, when ready.")
@click.option("--ready-wait", type=float, default=READY_WAIT, help="Seconds until all must answer.")
@click.option("--stop-grace", type=float, default=STOP_GRACE, help="Seconds between SIGTERM and SIGKILL at the end.")
@click.option("--seed", type=int, default=0, help="Seed of the simulated engine's weights.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def engines(engines_file: Path | None, **fields: Any) -> None:
    """Start COUNT engines and wait until all answer; EXTRA arguments after `--` go to each of them.

    Prints one URL a line on stdout when ready, then runs until Ctrl-C or SIGTERM, which end every process of theirs.
    Exit codes: 0 clean stop, 2 bad usage or configuration, 1 anything else (an engine died, a port was taken).
    """
    try:
        code = asyncio.run(serve(FleetSpec(**fields), engines_file))
    except LauncherError as error:
        click.echo(f"fleetgate engines: {error}", err=True)
        code = error.exit_code
    sys.exit(code)
