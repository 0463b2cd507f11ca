"""One client process of the load: keeps a number of rollouts in flight until told to stop, and writes what it saw.

``python load.py '{"urls": [...], "concurrency": 64, "seed": 1, ...}'`` (see `Plan`); prints ``started`` when the first
rollouts are on their way and one JSON line of rollouts at the end, which comes when standard input closes or after
``limit`` seconds. Sockets and a C parser only, so that the client is never what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import uvloop

TAIL: Final = 4096
"""Bytes of the end of a stream that are kept: the last chunks carry the finish reason and the usage."""

RETRY_WAIT: Final = 0.5
"""Seconds before a rollout that failed is replaced, so that a dead server is not hammered."""


@dataclass
class Plan:
    """What one client process does."""

    urls: list[str]
    concurrency: int
    seed: int
    model: str = "policy"
    stream: bool = True
    resubmit: bool = False
    """Ask again for what is missing after ``finish_reason: abort`` (answers that are not streamed)."""
    median: int = 192
    sigma: float = 0.9
    longest: int = 2048
    prompt: tuple[int, int] = (32, 256)
    limit: float = 600.0
    grace: float = 0.0
    """Seconds after the stop in which rollouts may still end; those that do not are cut and not counted as errors."""


@dataclass
class Rollout:
    """One rollout as its client saw it; times are Unix seconds."""

    started: float
    wanted: int
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    outcome: str = ""
    """``length`` or ``stop``; ``abort`` when nobody asked again; ``cut`` at the end of the run; else the error."""
    engine: str = ""
    attempts: int = 1
    version: str = ""
    parts: int = 1
    url: str = ""
    detail: str = field(default="", repr=False)


class Answer(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self.parser: Any = None
        self.body = bytearray()
        self.first = 0.0
        self.headers: dict[str, str] = {}
        self.keep_all = False
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def ask(self, raw: bytes, *, keep_all: bool) -> asyncio.Future[None]:
        """Send a request; the future ends with its answer."""
        assert self.transport is not None
        self.parser = httptools.HttpResponseParser(self)
        self.done = asyncio.get_running_loop().create_future()
        self.body.clear()
        self.headers.clear()
        self.first = 0.0
        self.keep_all = keep_all
        self.transport.write(raw)
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.done is None or self.done.done():
            self.reusable = False
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"unparsable answer: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        if not self.first:
            self.first = time.time()
        self.body += body
        if not self.keep_all and len(self.body) > 4 * TAIL:
            del self.body[:-TAIL]

    def on_message_complete(self) -> None:
        self.reusable = bool(self.parser.should_keep_alive())
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(f"connection lost: {exc}" if exc else "connection closed before the end of the answer")

    def _fail(self, why: str) -> None:
        self.reusable = False
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError(why))


class Client:
    """Keeps the plan's rollouts in flight."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rollouts: list[Rollout] = []
        self.stopping = False
        self.current: dict[asyncio.Task[None], Rollout] = {}

    def length(self, chance: random.Random) -> int:
        """A long-tailed length in tokens."""
        plan = self.plan
        return max(4, min(plan.longest, round(plan.median * chance.lognormvariate(0.0, plan.sigma))))

    def raw(self, prompt: list[int], tokens: int, host: str) -> bytes:
        """The request to the letter."""
        fields: dict[str, Any] = {
            "model": self.plan.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": self.plan.stream,
            "return_weight_versions": True,
        }
        if self.plan.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.plan.resubmit:
            fields["return_token_ids"] = True
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def slot(self, index: int) -> None:
        """One rollout after another; the first is in the middle, so that a load is steady from its start.

        Prompts and lengths follow from the seed and the slot alone, so that every route is given the same.
        """
        where = self.plan.urls[index % len(self.plan.urls)]
        url = urlsplit(where)
        chance = random.Random(self.plan.seed * 1_000_003 + index)
        share = chance.random()
        connection: Answer | None = None
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        while not self.stopping:
            wanted = max(2, round(self.length(chance) * share))
            share = 1.0
            prompt = [chance.randrange(256) for _ in range(chance.randint(*self.plan.prompt))]
            rollout = Rollout(time.time(), wanted, url=where)
            self.current[task] = rollout
            try:
                while True:
                    if connection is None or not connection.reusable:
                        _, connection = await loop.create_connection(Answer, url.hostname, url.port)
                    raw = self.raw(prompt, wanted - rollout.tokens, url.netloc)
                    await connection.ask(raw, keep_all=not self.plan.stream)
                    again = self.read(connection, rollout)
                    if again is None:
                        break
                    prompt = prompt + again
                    rollout.parts += 1
            except asyncio.CancelledError:
                rollout.outcome = "cut"
                if connection is not None and connection.transport is not None:
                    connection.transport.abort()
                raise
            except OSError as error:
                rollout.outcome = f"{type(error).__name__}: {error}"
                if connection is not None:
                    rollout.first = rollout.first or connection.first
                    rollout.engine = connection.headers.get("x-fleetgate-engine", "")
                connection = None
            rollout.ended = time.time()
            self.rollouts.append(rollout)
            if rollout.outcome not in ("length", "stop", "abort"):
                await asyncio.sleep(RETRY_WAIT)
        if connection is not None and connection.transport is not None:
            connection.transport.close()

    def read(self, answer: Answer, rollout: Rollout) -> list[int] | None:
        """Book an answer; the token ids of an aborted part, when the rest is to be asked for."""
        if not rollout.first:
            rollout.first = answer.first
        rollout.engine = answer.headers.get("x-fleetgate-engine", rollout.engine)
        rollout.version = answer.headers.get("x-fleetgate-weight-version", rollout.version)
        rollout.attempts = max(rollout.attempts, int(answer.headers.get("x-fleetgate-attempts", 1)))
        status = answer.parser.get_status_code()
        if status != 200:
            rollout.outcome = f"status {status}"
            rollout.detail = bytes(answer.body[:300]).decode(errors="replace")
            return None
        if self.plan.stream:
            self.read_stream(bytes(answer.body), rollout)
            return None
        found = json.loads(answer.body)
        choice = found["choices"][0]
        rollout.tokens += found["usage"]["completion_tokens"]
        rollout.outcome = choice["finish_reason"]
        if rollout.outcome == "abort" and self.plan.resubmit:
            if rollout.tokens < rollout.wanted:
                return list(choice.get("token_ids") or [])
            rollout.outcome = "length"
        return None

    @staticmethod
    def read_stream(tail: bytes, rollout: Rollout) -> None:
        """The finish reason and the usage are in the last events."""
        reason, tokens, error = "", -1, ""
        for line in tail.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            if (
                b'"error"' in line
                or b'"finish_reason":"' in line
                or b'"usage":{' in line
                or b'"completion_tokens"' in line
            ):
                try:
                    event = json.loads(line[6:])
                except ValueError:
                    continue
                if "error" in event:
                    error = json.dumps(event["error"])[:300]
                for choice in event.get("choices", []):
                    reason = choice.get("finish_reason") or reason
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if error or not tail.rstrip().endswith(b"data: [DONE]") or not reason or tokens < 0:
            rollout.outcome = "error event" if error else "stream without its end"
            rollout.detail = error or tail[-200:].decode(errors="replace")
            return
        rollout.tokens, rollout.outcome = tokens, reason

    async def run(self) -> None:
        """Start all, wait for the stop, end all."""
        plan = self.plan
        tasks = [asyncio.ensure_future(self.slot(index)) for index in range(plan.concurrency)]
        print("started", flush=True)
        loop = asyncio.get_running_loop()
        stop = loop.run_in_executor(None, sys.stdin.buffer.read)
        await asyncio.wait({stop, *tasks}, timeout=plan.limit, return_when=asyncio.FIRST_COMPLETED)
        self.stopping = True
        if plan.grace:
            await asyncio.wait(tasks, timeout=plan.grace)
        for each in tasks:
            if not each.done():
                self.current[each].ended = time.time()
            each.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [repr(each) for each in results if isinstance(each, Exception)]
        cut = [one for one in self.current.values() if one.outcome == "cut"]
        rows = [asdict(each) for each in (*self.rollouts, *cut)]
        sys.stdout.write(json.dumps({"rollouts": rows, "broken": broken}) + "\n")
        sys.stdout.flush()
        # The thread on standard input would hold the exit up where the limit came first.
        if not stop.done():
            os._exit(0)


def main() -> None:
    """Run the plan given as JSON."""
    plan = Plan(**json.loads(sys.argv[1]))
    uvloop.run(Client(plan).run())


if __name__ == "__main__":
    main()
