"""Writes docs/reference from the code, so that it cannot drift: ``python scripts/generate_reference.py [--check]``.

With ``--check`` nothing is written; the exit code is 1 if a page is not what the code says.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
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


def states_page() -> str:
    """The diagram of the engine states, drawn from the table."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STARTING}"]
    lines += [f"    {before} --> {after}: {event}" for (before, event), after in MOVES.items()]
    meaning = "\n".join(f"- **{event}**" for event in Event)
    ignored = ", ".join(sorted(f"{event} when {state}" for state, event in IGNORED))
    return (
        "# States of an engine\n\n```mermaid\n" + "\n".join(lines) + "\n```\n\nEvents:\n\n" + meaning
        + f"\n\nIgnored, because they are late news: {ignored}. Any other pair is refused.\n"
    )  # fmt: skip


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
