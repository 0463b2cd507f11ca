"""Writes docs/reference from the code, so that it cannot drift: ``python scripts/generate_reference.py [--check]``.

With ``--check`` nothing is written; the exit code is 1 if a page is not what the code says.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from pydantic import SecretStr

from proxy import errors
from proxy.config import ENV_PREFIX, Settings
from proxy.core.calls import CALLS
from proxy.core.engine_state import IGNORED, MOVES, Event, State
from proxy.core.routes import GENERATION

DOCS = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTE = "<!-- Made by scripts/generate_reference.py; do not edit. -->\n\n"


def settings_page() -> str:
    """One row a setting."""
    rows = ["| flag | environment | default | what |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default is None or default == [] or isinstance(default, SecretStr) else f"`{default}`"
        flag = f"`--{name.replace('_', '-')}`"
        rows.append(f"| {flag} | `{ENV_PREFIX}{name.upper()}` | {shown} | {field.description} |")
    text = "# Settings\n\nA flag beats the environment, which beats the YAML file (`--config`; a key is the flag with\n"
    return (
        text + "underscores). An unknown key is an error that names the nearest right one.\n\n" + "\n".join(rows) + "\n"
    )


def error_leaves() -> Iterator[type[errors.FleetgateError]]:
    """Every error that can become an answer, in the order of the file."""
    for _, item in inspect.getmembers(errors, inspect.isclass):
        if issubclass(item, errors.FleetgateError) and not item.__subclasses__() and item.code != "internal_error":
            yield item


def errors_page() -> str:
    """One row an error."""
    rows = ["| code | status | whose fault | may be sent again | when |", "|---|---|---|---|---|"]
    for item in sorted(error_leaves(), key=lambda leaf: (leaf.status, leaf.code)):
        when = (inspect.getdoc(item) or "").splitlines()[0]
        again = "yes" if item.may_retry else "no"
        rows.append(f"| `{item.code}` | {item.status} | {item.source} | {again} | {when} |")
    text = "# Errors\n\nThe proxy's own errors have the OpenAI shape and the header `X-Fleetgate-Error: <code>`. What\n"
    return text + "an engine answered is passed on as it is, without that header.\n\n" + "\n".join(rows) + "\n"


def endpoints_page() -> str:
    """Control calls, and the routes that are held while the gate is closed."""
    rows = ["| call | method | merged by | limit of a leg | one at a time | replay gets the first answer |"]
    rows.append("|---|---|---|---|---|---|")
    for call in CALLS.values():
        yes = ["yes" if flag else "no" for flag in (call.locks, call.replayable)]
        limit = f"`{call.limit.value}`"
        rows.append(f"| `{call.path}` | {call.method} | {call.merge} | {limit} | {yes[0]} | {yes[1]} |")
    held = "\n".join(f"- `POST {path.decode()}`" for path in GENERATION)
    return (
        "# Endpoints\n\n## Control calls, to every engine\n\n"
        + "\n".join(rows)
        + "\n\nMore can be added with `--fanout-paths`.\n\n## Held while the gate is closed\n\n"
        + held
        + "\n\nEvery other path goes to one engine at once, paused or not.\n"
    )


def meanings(kind: type[StrEnum]) -> dict[str, str]:
    """The text below each member of an enumeration, which Python itself forgets."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for member, text in pairwise(body.body):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.literal_eval(member.value)] = str(text.value.value)
    return found


def states_page() -> str:
    """The diagram of the engine states, drawn from the table, and what each word means."""
    moves = "\n".join(f"| {before} | {event} | {after} |" for (before, event), after in MOVES.items())
    meaning = "\n".join(f"- **{event}**: {text}" for event, text in meanings(Event).items())
    about = (inspect.getdoc(State) or "").replace("``", "`")
    ignored = ", ".join(sorted(f"{event} when {state}" for state, event in IGNORED))
    return (
        f"# States of an engine\n\n![States and moves](states.svg)\n\n{about}\n\n"
        f"| from | event | to |\n|---|---|---|\n{moves}\n\nEvents:\n\n{meaning}"
        f"\n\nIgnored, because they are late news: {ignored}. Any other pair is refused.\n"
    )


PLACES = {
    State.STARTING: (100, 60),
    State.FENCED: (380, 60),
    State.READY: (680, 60),
    State.DRAINING: (680, 230),
    State.DOWN: (380, 360),
}
"""Where each state is drawn; a state without a place would be an error."""
WIDTH, HEIGHT = 118, 44


def border(x: float, y: float, ux: float, uy: float) -> tuple[float, float]:
    """Where a ray from the middle of a box leaves it."""
    reach = min(WIDTH / 2 / abs(ux) if ux else math.inf, HEIGHT / 2 / abs(uy) if uy else math.inf)
    return x + ux * reach, y + uy * reach


def states_svg() -> str:
    """The table as a picture: what moves between two states is one arrow with all its events."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (before, event), after in MOVES.items():
        arrows.setdefault((before, after), []).append(str(event))
    parts = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 420" role="img" font-family="sans-serif" '
            'font-size="15"><title>States of an engine and the events that move it</title>'
        ),
        (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#555"/></marker></defs>'
        ),
        '<rect width="780" height="420" rx="8" fill="#fff"/>',
    ]
    for (before, after), events in arrows.items():
        (x1, y1), (x2, y2) = PLACES[before], PLACES[after]
        length = math.hypot(x2 - x1, y2 - y1)
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        # Arrows that go both ways lie beside each other.
        aside = 13 if (after, before) in arrows else 0
        dx, dy = -uy * aside, ux * aside
        (sx, sy), (tx, ty) = border(x1, y1, ux, uy), border(x2, y2, -ux, -uy)
        parts.append(
            f'<path d="M{sx + dx:.0f} {sy + dy:.0f}L{tx + dx:.0f} {ty + dy:.0f}" stroke="#555" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )
        # Nearer to where it begins: arrows cross in the middle.
        mx, my = sx + (tx - sx) * 0.42 + dx * 2.2, sy + (ty - sy) * 0.42 + dy * 1.8
        parts.append(
            f'<text x="{mx:.0f}" y="{my + 5:.0f}" text-anchor="middle" fill="#222" stroke="#fff" stroke-width="4" '
            f'paint-order="stroke">{", ".join(events)}</text>'
        )
    for state, (x, y) in PLACES.items():
        color = "#1a6b33" if state is State.READY else "#444"
        parts.append(
            f'<rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="10" '
            f'fill="#f6f8fa" stroke="{color}" stroke-width="2"/>'
            f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-weight="bold" fill="{color}">{state}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


async def metrics_page() -> str:
    """One row a metric family, read off a page of a proxy without engines."""
    from proxy.data.plane import DataPlane
    from proxy.fleet.registry import Fleet
    from proxy.observe.control_stats import ControlStats
    from proxy.observe.exposition import Format
    from proxy.observe.metrics import OwnPage
    from proxy.observe.scrape import Scraper

    fleet = Fleet(asyncio.get_running_loop().time)
    plane = DataPlane(Settings(), fleet)
    page = b"".join(OwnPage(plane, ControlStats(), Scraper(fleet)).render(Format.TEXT)).decode()
    kinds: dict[str, str] = {}
    texts: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name, _, text = line[7:].partition(" ")
            texts[name] = text
        elif line.startswith("# TYPE "):
            name, _, kind = line[7:].partition(" ")
            kinds[name] = kind
    rows = ["| metric | type | what |", "|---|---|---|"]
    rows += [f"| `{name}` | {kind} | {texts.get(name, '')} |" for name, kind in kinds.items()]
    text = "# Metrics\n\n`GET /metrics`: these, and the engines' own `vllm:*` families with an `engine` label unique\n"
    return text + "in the fleet.\n\n" + "\n".join(rows) + "\n"


def pages() -> dict[str, str]:
    """All pages by file name."""
    return {
        "settings.md": NOTE + settings_page(),
        "errors.md": NOTE + errors_page(),
        "endpoints.md": NOTE + endpoints_page(),
        "states.md": NOTE + states_page(),
        "states.svg": states_svg(),
        "metrics.md": NOTE + asyncio.run(metrics_page()),
    }


def main() -> int:
    """Write or check."""
    stale = []
    DOCS.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        print(f"docs/reference is not what the code says ({', '.join(stale)}); run scripts/generate_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
