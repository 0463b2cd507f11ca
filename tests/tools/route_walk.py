"""Knocks at every route of a running proxy with no, a data and the control credential: ``python -m tests.tools.route_walk``.

Routes are read off the application, so one that is added later is walked too. With ``--write`` the table in SECURITY.md
is written anew.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from yarl import URL

from proxy import app as proxy_app
from proxy.config import Settings
from proxy.core.calls import CALLS
from proxy.core.paths import Route, classify
from proxy.core.routes import GENERATION, OTHER
from proxy.observe.control_stats import ControlStats
from proxy.observe.pages import add_routes
from tests.scenarios.control.mock import MockEngine

PAGE = Path(__file__).parents[2] / "SECURITY.md"
BEGIN, END = "<!-- Made by tests/tools/route_walk.py; do not edit. -->\n", "<!-- end -->\n"
TOKEN = "control-51c2"
CREDENTIALS = {"nothing": None, "data key": "Bearer data-51c3", "control token": f"Bearer {TOKEN}"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
FANOUT = "/areal_*"
ANY = "/any/other/path"
BODY = {"new_version": "v1", "lora_name": "a", "lora_path": "/a", "session_id": "s"}
"""Enough for each route to do what it does."""
SIDES = ("one port", "main port beside a control port", "control port")


@dataclass(frozen=True)
class Knock:
    """One method at one path, at each side with each credential."""

    method: str
    path: str
    """As the router has it, with the placeholders of a pattern."""
    control: bool
    """It does something to the fleet, or asks the engines for what is the trainer's business."""
    served: bool
    """The route takes this method."""


@dataclass
class Walk:
    """What came out.

    Attributes:
        found: for each side and knock, what each credential got: ``open``, or the status with which the proxy refused.
        reached: control paths that an engine got without the control credential.
        leaked: paths with which an engine got the control token.
    """

    found: dict[str, dict[Knock, tuple[str, ...]]]
    reached: set[str]
    leaked: set[str]

    @property
    def open_control(self) -> list[tuple[str, Knock]]:
        """Control routes that opened without the control credential."""
        return [
            (side, knock)
            for side, knocks in self.found.items()
            for knock, results in knocks.items()
            if knock.control and "open" in results[:-1]
        ]


def knocks(app: proxy_app.App) -> list[Knock]:
    """Everything that there is to knock at, reads first and what takes an engine away last."""
    table = app.control.make_app()
    add_routes(table, app.plane, ControlStats())
    found: dict[tuple[str, str], bool] = {}
    for resource in table.router.resources():
        served = {route.method for route in resource}
        path = resource.canonical
        for method in METHODS:
            call = CALLS.get(path.rstrip("/"))
            wanted = served if call is None else {call.method}
            found[method, path] = method in wanted or "*" in wanted
    for raw in (*GENERATION, *OTHER, ANY.encode()):
        assert classify(raw) is Route.DATA
        for method in METHODS:
            found.setdefault((method, raw.decode()), method == "POST" if raw in GENERATION else True)
    out = [
        Knock(method, path, is_control(method, path, served=served), served) for (method, path), served in found.items()
    ]
    return sorted(
        out, key=lambda knock: (knock.control, knock.path.startswith("/fleet/engines"), knock.method == "DELETE")
    )


def is_control(method: str, path: str, *, served: bool) -> bool:
    """Every call to all engines and every engine of ``/fleet``, whatever the method, and whatever else writes there."""
    plain = path.rstrip("/")
    if plain in CALLS or plain.startswith(FANOUT[:-1]):
        return True
    writes = served and method not in ("GET", "HEAD")
    return plain.startswith("/fleet/engines") or (plain.startswith("/fleet") and writes)


def outcome(error: str | None) -> str:
    """What the proxy itself said: an engine's own refusal carries no ``X-Fleetgate-Error``."""
    return {"unauthorized": "401", "forbidden": "403", "not_found": "404"}.get(error or "", "open")


@asynccontextmanager
async def proxied(**settings: object) -> AsyncIterator[tuple[proxy_app.App, MockEngine]]:
    """An engine and a proxy with a control token in front of it."""
    engine = await MockEngine().start()
    app = await proxy_app.start(
        Settings(
            engine=[engine.url],
            port=0,
            control_token=TOKEN,
            allow_collective_rpc=True,
            fanout_paths=[FANOUT],
            drain_timeout=0.0,
            hold_timeout=0.2,
            **settings,
        )
    )
    try:
        yield app, engine
    finally:
        await app.stop()
        await engine.kill()


async def knock_at(session: aiohttp.ClientSession, base: str, knock: Knock, credential: str | None, engine: str) -> str:
    """One request; only the head of the answer counts."""
    headers = {"Authorization": credential} if credential else {}
    path = knock.path
    for name, value in (("{engine}", engine), ("{action}", "fence"), ("{rest}", "update")):
        path = path.replace(name, value)
    body = None if knock.method in ("GET", "HEAD") else BODY
    async with session.request(knock.method, URL(base + path, encoded=True), headers=headers, json=body) as answer:
        return outcome(answer.headers.get("X-Fleetgate-Error"))


async def walk() -> Walk:
    """Every route at every side with every credential."""
    result = Walk({}, set(), set())
    for side in SIDES:
        settings = {} if side == "one port" else {"control_port": 0}
        async with proxied(**settings) as (app, engine), aiohttp.ClientSession() as session:
            base = app.control_url if side == "control port" else app.url
            every = knocks(app)
            found: dict[Knock, list[str]] = {knock: [] for knock in every}
            for name, credential in CREDENTIALS.items():
                engine.seen.clear()
                for knock in every:
                    found[knock].append(await knock_at(session, base, knock, credential, engine.id))
                    if knock.path == "/pause":
                        # Otherwise whatever is knocked at next would be held.
                        await session.post(f"{app.control_url}/resume", headers={"Authorization": f"Bearer {TOKEN}"})
                for seen in engine.seen:
                    # The proxy looks at engines of its own accord.
                    own = seen.path in ("/resume", "/is_paused", "/weight_info", "/get_world_size")
                    if name != "control token" and not own and is_control(seen.method, seen.path, served=True):
                        result.reached.add(seen.path)
                    if any(TOKEN in value for _, value in seen.headers):
                        result.leaked.add(seen.path)
            result.found[side] = {knock: tuple(results) for knock, results in found.items()}
    return result


def table(result: Walk) -> str:
    """Routes with the same results in one row; only the methods that a route takes."""
    rows: dict[tuple[tuple[str, ...], ...], list[Knock]] = {}
    for knock in result.found[SIDES[0]]:
        if knock.served and not (len(knock.path) > 1 and knock.path.endswith("/")) and knock.method != "HEAD":
            rows.setdefault(tuple(result.found[side][knock] for side in SIDES), []).append(knock)
    lines = [f"| routes | {' | '.join(SIDES)} |", "|---|" + "---|" * len(SIDES)]
    for key, members in sorted(rows.items(), key=lambda row: row[1][0].control):
        cells = ["open to all" if set(each) == {"open"} else ", ".join(each) for each in key]
        lines.append(f"| {', '.join(names(members))} | {' | '.join(cells)} |")
    control = [knock for knock in result.found[SIDES[0]] if knock.control]
    paths = len({knock.path for knock in result.found[SIDES[0]]})
    tries = sum(len(results) for knocks in result.found.values() for results in knocks.values())
    told = (
        f"{paths} paths with {len(METHODS)} methods, {tries} requests in all. Of the {len(control)} pairs of a control path "
        f"and a method, at each of three listeners, **{len(result.open_control)} are open without the control token**."
    )
    return "\n".join([*lines, "", told]) + "\n"


def names(members: list[Knock]) -> list[str]:
    """Routes as people write them; a group that docs/reference lists is named as a whole, if it is here as a whole."""
    given: dict[str, list[str]] = {}
    for knock in members:
        given.setdefault(knock.path, []).append(knock.method)
    out = []
    for group, what in (
        ({path.decode() for path in GENERATION}, "generation routes"),
        (set(CALLS), "control calls"),
        ({path.decode() for path in OTHER}, "other routes of vLLM, such as `/v1/models`"),
    ):
        if group <= given.keys():
            out.append(f"the {len(group)} {what}")
            given = {path: methods for path, methods in given.items() if path not in group}
    for path, methods in given.items():
        name = path.replace("{engine}", "ID").replace("{action}", "{drain,admit,fence}")
        if path == ANY:
            out.append("any other path")
        elif "{rest}" in path:
            out.append(f"`{FANOUT}` as an example of `--fanout-paths`")
        else:
            out.append(f"`{'/'.join(sorted(methods))} {name}`")
    return out


def section(text: str) -> str:
    """SECURITY.md with this table in its place."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    made = table(asyncio.run(walk()))
    print(made)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(section(made), encoding="utf-8")
