"""What a running proxy says about its fleet, in a terminal: ``fleetgate status`` and ``fleetgate sync-report``.

Reads the same JSON as the live page. Whatever engines and trainers put into it is shown as plain text: escape sequences
in a weight label must not reach the terminal.
"""

from __future__ import annotations

import os
import ssl
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import click
import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxy.core.addresses import parse_engine_url

TIMEOUT = 5.0
"""Seconds for one answer of the proxy; it answers these pages in milliseconds whatever the engines do."""
INTERVAL = 1.0
"""Seconds between two looks of ``--watch``; the engines' metrics are read at most that often anyway."""
MAX_COLUMNS = 6
"""Engines that get a column of their own in a report; more are summed up, or no terminal would be wide enough."""

STATE_STYLES = {"ready": "green", "draining": "yellow", "fenced": "red", "starting": "blue", "down": "red"}
STATE_MARKS = {"ready": "●", "draining": "◐", "fenced": "▲", "starting": "○", "down": "✕"}
PHASE_STYLES = {"open": "green", "paused": "yellow", "pausing": "yellow"}
OUTCOME_STYLES = {"ok": "green", "failed": "red", "running": "blue"}


class UnreachableError(Exception):
    """The proxy did not answer; the message says what to do."""


def default_url() -> str:
    """Where a proxy listens unless it is told otherwise."""
    port = os.environ.get("FLEETGATE_PORT", "8000")
    return f"http://127.0.0.1:{port if port.isdigit() else '8000'}"


class Reader:
    """Reads pages of a proxy.

    Args:
        url: its base URL.
        token: the control token, if the pages need one.
        ca: PEM file with the CA of its certificate.
    """

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        context = ssl.create_default_context(cafile=ca) if self._url.startswith("https:") else None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def json(self, path: str) -> Any:
        """A page.

        Raises:
            UnreachableError: no answer, a refusal, or something that is no proxy.
        """
        request = urllib.request.Request(self._url + path, headers=self._headers)  # noqa: S310 - the user's own URL
        try:
            with self._opener.open(request, timeout=TIMEOUT) as answer:
                return orjson.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise UnreachableError(f"{self._url}{path} needs the control token; give --control-token") from None
            raise UnreachableError(f"{self._url}{path} answers {error.code}; is it a fleetgate proxy?") from None
        except orjson.JSONDecodeError:
            raise UnreachableError(f"{self._url}{path} is no JSON; is it a fleetgate proxy?") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"no proxy at {self._url} ({reason}); say where with --url") from None


def plain(value: object) -> str:
    """A value from outside without anything that a terminal would act upon."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))


def seconds(value: float) -> str:
    """A duration for people."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _number(value: float | None, pattern: str = "{:,.0f}") -> str:
    return "-" if value is None else pattern.format(value)


# Status


def render_status(fleet: dict[str, Any], load: dict[str, Any]) -> Group:
    """The fleet at a glance.

    Args:
        fleet: ``GET /fleet``.
        load: the engines of ``GET /fleet/load``, by id; may be empty.
    """
    gate, holder = fleet["gate"], fleet["lifecycle"]
    head = Text()
    head.append(plain(fleet["phase"]), style=f"bold {PHASE_STYLES.get(fleet['phase'], 'blue')}")
    head.append(f"   weights {plain(fleet['weight_version'] or 'unknown')}")
    head.append(f"   ready {fleet['ready']} of {len(fleet['engines'])}")
    head.append(f"   held {gate['held_requests']}")
    if gate["closed"]:
        head.append(f"\ngate closed for {seconds(gate['seconds'])} by {plain(gate['by'])}", style="yellow")
    if holder:
        head.append(f"\nlife-cycle held by {plain(holder['call'])} of {plain(holder['client'])}", style="blue")
    if fleet["problem"] and not gate["closed"]:
        head.append(f"\n{plain(fleet['problem'])}", style="red")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("Engine", no_wrap=True)
    table.add_column("State", no_wrap=True)
    table.add_column("Weights", no_wrap=True, max_width=24)
    for name in ("In flight", "Tokens/s", "Run+wait", "KV"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Why", overflow="fold")
    for engine in fleet["engines"]:
        work = load.get(engine["id"], {})
        running = work.get("running")
        state = engine["state"]
        cache = work.get("kv_cache")
        table.add_row(
            Text(plain(engine["id"])),
            Text(f"{STATE_MARKS.get(state, ' ')} {plain(state)}", style=STATE_STYLES.get(state, "")),
            Text(plain(engine["weight_version"] if engine["weight_version"] is not None else "unknown")),
            str(engine["inflight"]),
            _number(work.get("tokens_per_second")),
            "-" if running is None else f"{running:.0f}+{work.get('waiting') or 0:.0f}",
            _number(None if cache is None else cache * 100, "{:.0f} %"),
            Text(plain(_why(engine))),
        )
    return Group(head, Text(), table)


def _why(engine: dict[str, Any]) -> str:
    words = [name for name in ("paused", "updating", "plain") if engine.get(name)]
    if engine.get("suspect") and engine["state"] != "down":
        words.append("being checked")
    words += [f"asleep ({name})" for name in engine.get("asleep", [])]
    if engine["state"] != "ready":
        words.append(engine["reason"])
    if engine["state"] == "down" and engine.get("last_error"):
        words.append(engine["last_error"])
    return "; ".join(words)


def _look(reader: Reader) -> Group:
    fleet = reader.json("/fleet")
    try:
        load = reader.json("/fleet/load")["engines"]
    except UnreachableError:
        # The fleet is worth showing without the engines' own numbers.
        load = {}
    return render_status(fleet, load)


def _watch(reader: Reader, console: Console) -> None:
    def frame() -> Group:
        try:
            return _look(reader)
        except UnreachableError as error:
            return Group(Text(str(error), style="red"))

    if not console.is_terminal:
        # Into a file or a pipe: one look below the other.
        while True:
            console.print(frame())
            time.sleep(INTERVAL)
    with Live(frame(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(), refresh=True)
            time.sleep(INTERVAL)


# The report on syncs


def render_syncs(syncs: Sequence[dict[str, Any]]) -> Iterator[Text | Table]:
    """The last syncs, newest first, a table each.

    Args:
        syncs: of ``GET /fleet/syncs``.
    """
    for sync in syncs:
        version = "" if sync["version"] is None else f" -> {plain(sync['version'])}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sync["started"]))
        title = f"sync {sync['number']}{version}  {when}  {seconds(sync['seconds'])}  {sync['outcome']}"
        yield Text(title, style=f"bold {OUTCOME_STYLES.get(sync['outcome'], '')}")
        for line in sync["trouble"]:
            yield Text(f"  {plain(line)}", style="red")
        if sync["running"]:
            yield Text(f"  {plain(sync['running']['call'])} is running", style="blue")
        yield _calls(sync)
        yield Text()


def _calls(sync: dict[str, Any]) -> Table:
    engines = list(dict.fromkeys(engine for call in sync["calls"] for engine in call["legs"]))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("  Call", no_wrap=True)
    for name in ("Status", "Whole", "Overhead"):
        table.add_column(name, justify="right")
    columns = engines if len(engines) <= MAX_COLUMNS else ["fastest", "median", "slowest"]
    for name in _short(columns):
        table.add_column(Text(plain(name)), justify="right", no_wrap=True)
    for call in sync["calls"]:
        times = f" x{call['count']}" if call["count"] > 1 else ""
        legs = {engine: _leg(call, engine) for engine in engines}
        cells = (
            [_leg_text(*legs[engine]) for engine in engines]
            if len(engines) <= MAX_COLUMNS
            else _summed_up({engine: leg for engine, leg in legs.items() if leg[0] is not None})
        )
        table.add_row(
            Text(f"  {plain(call['call'])}{times}"),
            Text(str(call["status"]), style="red" if call["status"] >= 400 else ""),
            seconds(call["seconds"]),
            seconds(call["overhead_seconds"]),
            *cells,
        )
    if sync["dropped_calls"]:
        table.add_row(f"  and {sync['dropped_calls']} more calls")
    return table


def _short(names: Sequence[str]) -> list[str]:
    """Engines that share a host are told apart by their ports, which leaves room for the numbers."""
    hosts = {name.rpartition(":")[0] for name in names}
    return [f":{name.rpartition(':')[2]}" for name in names] if len(hosts) == 1 and "" not in hosts else list(names)


def _leg(call: dict[str, Any], engine: str) -> tuple[float | None, str]:
    """Seconds of an engine in a call, None if it took no part, and how that ended if not well."""
    leg = call["legs"].get(engine)
    if leg is None:
        return None, ""
    return leg["seconds"], "" if leg["outcome"] == "answered" else leg["outcome"]


def _leg_text(spent: float | None, bad: str) -> Text:
    if spent is None:
        return Text("-")
    return Text(f"{seconds(spent)} {bad}".strip(), style="red" if bad else "")


def _summed_up(legs: dict[str, tuple[float | None, str]]) -> list[Text]:
    spent = {engine: leg[0] or 0.0 for engine, leg in legs.items()}
    if not spent:
        return [Text("-")] * 3
    slowest = max(spent, key=spent.__getitem__)
    failed = [f"{plain(engine)} {leg[1]}" for engine, leg in legs.items() if leg[1]]
    last = f"{seconds(spent[slowest])} {plain(slowest)}" + (f"; {', '.join(failed)}" if failed else "")
    return [
        Text(seconds(min(spent.values()))),
        Text(seconds(statistics.median(spent.values()))),
        Text(last, style="red" if failed else ""),
    ]


# Commands


def proxy_url(context: click.Context, option: click.Parameter, value: str | None) -> str | None:  # noqa: ARG001
    """Judge an option that says where a proxy is.

    Raises:
        click.BadParameter: it is no base URL.
    """
    if value is not None:
        try:
            parse_engine_url(value, "proxy", 8000)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value


def proxy_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which proxy is meant."""
    for option in (
        click.option("--ca", metavar="FILE", help="PEM file with the CA of the proxy's certificate."),
        click.option(
            "--control-token",
            envvar="FLEETGATE_CONTROL_TOKEN",
            help="Control token, if the proxy asks for one.  [env: FLEETGATE_CONTROL_TOKEN]",
        ),
        click.option(
            "--url",
            default=default_url,
            show_default="http://127.0.0.1:8000",
            callback=proxy_url,
            help="Where the proxy listens.",
        ),
    ):
        command = option(command)
    return command


def _fail(error: Exception) -> NoReturn:
    click.echo(f"fleetgate: {error}", err=True)
    sys.exit(1)


@click.command()
@proxy_options
@click.option("--watch", is_flag=True, help="Keep looking, once a second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="The fleet as JSON.")
def status(url: str, control_token: str | None, ca: str | None, *, watch: bool, as_json: bool) -> None:
    """Show the fleet: engines, weights, gate, held requests.

    Example: fleetgate status --watch
    """
    console = Console()
    try:
        reader = Reader(url, control_token, ca)
        if as_json:
            click.echo(orjson.dumps(reader.json("/fleet"), option=orjson.OPT_INDENT_2).decode())
        elif watch:
            _watch(reader, console)
        else:
            console.print(_look(reader))
    except KeyboardInterrupt:
        pass
    except (UnreachableError, OSError) as error:
        _fail(error)


@click.command("sync-report")
@proxy_options
@click.option("--last", type=click.IntRange(min=1), default=5, show_default=True, help="How many syncs.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def sync_report(url: str, control_token: str | None, ca: str | None, *, last: int, as_json: bool) -> None:
    """Show the last weight syncs: how long each call took, as a whole and on each engine.

    Example: fleetgate sync-report --last 3
    """
    try:
        syncs = Reader(url, control_token, ca).json(f"/fleet/syncs?last={last}")["syncs"]
    except (UnreachableError, OSError) as error:
        _fail(error)
    if as_json:
        click.echo(orjson.dumps(syncs, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console()
    if not syncs:
        console.print("no weight sync since the proxy started")
    for part in render_syncs(syncs):
        console.print(part)
