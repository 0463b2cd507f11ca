"""Looks at one engine and says what would go wrong with it.

Every look is a read, or a request that an engine refuses for its form: nothing is generated, paused or changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum

from proxy.config import Settings
from proxy.core.identity import start_time
from proxy.data.upstream import Answer, FetchError, Upstream
from proxy.fleet.said import fields_of

TIMEOUT = 5.0
"""Seconds for one answer. A healthy server answers these in milliseconds; one that loads a model, in seconds."""
KEEP_ALIVE_WAIT = 6.5
"""Seconds for which an idle connection is watched: vLLM closes one after 5."""
MAX_SKEW = 2.0
"""Seconds by which clocks may differ. ``Date`` has whole seconds; more makes logs of a sync hard to read together."""
OLDEST = (0, 33)
"""First vLLM that refuses requests while paused and tells weight versions on every route (docs/adr/0003)."""


class Grade(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name, stable.
        grade: how bad it is.
        text: what was seen.
        fix: what to do; empty if there is nothing to do.
    """

    check: str
    grade: Grade
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found out about one engine.

    Attributes:
        url: canonical.
        findings: in the order of the checks.
        version: weight label, if it tells one.
        models: names that it serves.
        server: version of vLLM.
    """

    url: str
    findings: tuple[Finding, ...]
    version: str | None = None
    models: tuple[str, ...] = ()
    server: str | None = None


class Examiner:
    """Looks at one engine.

    Args:
        url: canonical base URL.
        settings: connection settings, API key, CA.
        clock: Unix time (seconds).
    """

    def __init__(self, url: str, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.url = url
        self._settings = settings
        self._clock = clock
        context = None
        if url.startswith("https:"):
            context = ssl.create_default_context(cafile=str(settings.engine_ca) if settings.engine_ca else None)
        self._context = context
        self._upstream = Upstream(url, connect_timeout=TIMEOUT, ssl_context=context)
        key = settings.engine_api_key
        self._authorization = (
            ((b"Authorization", b"Bearer " + key.get_secret_value().encode("latin-1")),) if key is not None else ()
        )

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Answer | None:
        headers = [*self._authorization]
        if body is not None:
            headers.append((b"Content-Type", b"application/json"))
        try:
            return await self._upstream.fetch(method, path, headers=headers, body=body, timeout=TIMEOUT)
        except FetchError:
            return None

    async def examine(self) -> Examined:
        """All checks; the others are left out when nothing answers."""
        reach, answer = await self.reach()
        if answer is None:
            return Examined(self.url, (reach,))
        clock = self.clock(answer)
        checks: Sequence[Awaitable[Finding]] = (
            self.dev_mode(), self.paused(), self.scale_out(), self.world_size(), self.identity(), self.keep_alive(),
        )  # fmt: skip
        (server, models, version), looked = await asyncio.gather(self._names(), asyncio.gather(*checks))
        findings = (reach, self.server(server), self.models(models), *looked, clock)
        return Examined(self.url, findings, version, models or (), server)

    async def _names(self) -> tuple[str | None, tuple[str, ...] | None, str | None]:
        server, models, weights = await asyncio.gather(
            self._ask("GET", "/version"), self._ask("GET", "/v1/models"), self._ask("GET", "/weight_info")
        )
        listed = fields_of(models).get("data")
        names = (
            tuple(str(item.get("id")) for item in listed if isinstance(item, dict))
            if isinstance(listed, list)
            else None
        )
        if models is not None and models.status == 401:
            names = None
        return _text(fields_of(server).get("version")), names, _text(fields_of(weights).get("weight_version"))

    async def reach(self) -> tuple[Finding, Answer | None]:
        """``GET /health``."""
        started = self._clock()
        try:
            answer = await self._upstream.fetch("GET", "/health", timeout=TIMEOUT)
        except FetchError as error:
            return Finding(
                "reachable",
                Grade.FAIL,
                error.failure.detail,
                "is it running, is the address right, does a firewall or --host 127.0.0.1 keep it from this machine?",
            ), None
        spent = (self._clock() - started) * 1000
        if answer.status == 200:
            return Finding("reachable", Grade.OK, f"/health answers in {spent:.0f} ms"), answer
        fix = "wait until its model is loaded, or read its log: a dead engine process answers 503"
        return Finding("reachable", Grade.FAIL, f"/health answers {answer.status}", fix), answer

    def server(self, version: str | None) -> Finding:
        """Its vLLM."""
        if version is None:
            return Finding("vllm", Grade.WARN, "it does not say which vLLM it is", "is it a vLLM server at all?")
        if _release(version) and _release(version) < OLDEST:
            fix = f"use vLLM {'.'.join(map(str, OLDEST))} or newer: older ones hang requests that come while they pause"
            return Finding("vllm", Grade.WARN, f"vLLM {version}", fix)
        return Finding("vllm", Grade.OK, f"vLLM {version}")

    def models(self, names: tuple[str, ...] | None) -> Finding:
        """``GET /v1/models``."""
        if names is None:
            fix = "give its key with --engine-api-key" if not self._authorization else "is --engine-api-key right?"
            return Finding("models", Grade.WARN, "/v1/models was refused", fix)
        if not names:
            return Finding("models", Grade.WARN, "it serves no model")
        return Finding("models", Grade.OK, f"serves {', '.join(names)}")

    async def dev_mode(self) -> Finding:
        """The RL routes exist."""
        answer = await self._ask("GET", "/weight_info")
        if answer is not None and answer.status == 200:
            return Finding("dev-mode", Grade.OK, f"weights {fields_of(answer).get('weight_version')!r}")
        seen = "no answer" if answer is None else str(answer.status)
        fix = "start it with VLLM_SERVER_DEV_MODE=1; without, it gets requests but no pause and no weights"
        return Finding("dev-mode", Grade.FAIL, f"/weight_info: {seen}", fix)

    async def paused(self) -> Finding:
        """Nobody left it paused or asleep."""
        paused, asleep = await asyncio.gather(self._ask("GET", "/is_paused"), self._ask("GET", "/is_sleeping"))
        if fields_of(paused).get("is_paused") is True:
            return Finding("awake", Grade.WARN, "generation is paused", "POST /resume to it, or through the proxy")
        if fields_of(asleep).get("is_sleeping") is True:
            return Finding("awake", Grade.WARN, "it sleeps", "POST /wake_up to it, or through the proxy")
        return Finding("awake", Grade.OK, "neither paused nor asleep")

    async def scale_out(self) -> Finding:
        """``/inference/v1/generate`` is enabled: an empty request is refused for its form, not for the route."""
        answer = await self._ask("POST", "/inference/v1/generate", b"{}")
        if answer is None or answer.status in (403, 404):
            seen = "no answer" if answer is None else str(answer.status)
            fix = "start it with --enable-scale-out if your trainer sends token ids there (SkyRL and prime-rl do)"
            return Finding("scale-out", Grade.WARN, f"/inference/v1/generate: {seen}", fix)
        if answer.status == 401:
            return Finding("scale-out", Grade.WARN, "it wants an API key", "give its key with --engine-api-key")
        return Finding("scale-out", Grade.OK, "/inference/v1/generate is open")

    async def world_size(self) -> Finding:
        """Workers, for the ranks of a transfer group."""
        size = fields_of(await self._ask("GET", "/get_world_size")).get("world_size")
        if isinstance(size, int):
            return Finding("world-size", Grade.OK, f"{size} worker{'s' if size != 1 else ''}")
        return Finding(
            "world-size", Grade.WARN, "it does not tell its world size", "ranks would be counted as one each"
        )

    async def identity(self) -> Finding:
        """Its start time, by which a restart is noticed."""
        answer = await self._ask("GET", "/metrics")
        began = start_time(answer.body) if answer is not None and answer.status == 200 else None
        if began is None:
            fix = "do not start it with --disable-log-stats; restarts are then noticed by the label alone"
            return Finding("identity", Grade.WARN, "no process_start_time_seconds in /metrics", fix)
        return Finding("identity", Grade.OK, f"runs for {max(0.0, self._clock() - began):.0f} s")

    async def keep_alive(self) -> Finding:
        """How long it keeps an idle connection, against how long the proxy would."""
        kept = await self._idle()
        limit = self._settings.engine_idle
        if kept is None:
            return Finding("keep-alive", Grade.OK, f"keeps idle connections for over {KEEP_ALIVE_WAIT:g} s")
        if kept > limit:
            return Finding(
                "keep-alive", Grade.OK, f"closes idle connections after {kept:.1f} s; the proxy, {limit:g} s"
            )
        fix = f"set --engine-idle well below {kept:.1f}, or VLLM_HTTP_TIMEOUT_KEEP_ALIVE higher: requests would race it"
        return Finding("keep-alive", Grade.FAIL, f"closes idle connections after {kept:.1f} s", fix)

    async def _idle(self) -> float | None:
        """Seconds until it closes an idle connection; None if it did not while we looked, 0 if it never keeps one."""
        loop = asyncio.get_running_loop()
        request = self._upstream.request_head(b"GET", b"/health", (), None)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(TIMEOUT):
                reader, writer = await asyncio.open_connection(
                    self._upstream.host, self._upstream.port, ssl=self._context
                )
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
            if b"\r\nconnection: close" in head.lower():
                return 0.0
            started = loop.time()
            try:
                async with asyncio.timeout(KEEP_ALIVE_WAIT):
                    while await reader.read(65536):
                        pass
            except TimeoutError:
                return None
            return loop.time() - started
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return 0.0
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def clock(self, answer: Answer) -> Finding:
        """Its ``Date`` against our clock."""
        date = answer.head.get(b"date")
        try:
            told = parsedate_to_datetime((date or b"").decode("latin-1")).timestamp()
        except ValueError:
            return Finding("clock", Grade.OK, "it does not tell the time")
        skew = told - self._clock()
        # Date is cut to whole seconds, so up to one second of lag is none.
        if -1 - MAX_SKEW <= skew <= MAX_SKEW:
            return Finding("clock", Grade.OK, "agrees with this machine's")
        way = "ahead of" if skew > 0 else "behind"
        return Finding("clock", Grade.WARN, f"{abs(skew):.0f} s {way} this machine's", "set both by NTP")


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; empty if it has none (a build from source may say ``dev``)."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if len(parts) == 2 and all(part.isdigit() for part in parts) else ()
