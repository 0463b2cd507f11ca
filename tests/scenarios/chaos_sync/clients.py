"""The load: rollouts on the routes that say which weights made each token, and their judgement."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from engine_launcher.sim.model import check_spans
from engine_launcher.sim.tokenizer import encode, render_chat
from proxy.core.marks import read_label
from tests.scenarios.chaos_sync.truth import Truth

ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
HUNG_SECONDS = 45.0
"""A request is held 20 s at most in these runs; one that takes this long hangs."""


@dataclass(slots=True)
class Answer:
    """One answer that came whole, or that says itself that it was aborted."""

    number: int
    route: str
    stream: bool
    engine: str
    fleet_version: str
    prompt: list[int]
    tokens: list[int]
    spans: list[tuple[str, int, int]]
    finish: str | None
    began: float
    ended: float
    again: bool = False

    def __str__(self) -> str:
        kind = "stream" if self.stream else "json"
        spans = ",".join(f"{label}[{start}:{end}]" for label, start, end in self.spans)
        return (
            f"answer {self.number} of {self.engine} ({self.route} {kind}) {self.began:.3f}-{self.ended:.3f} "
            f"dispatched at {self.fleet_version}, {len(self.tokens)} tokens, {self.finish}, spans {spans}"
        )


@dataclass
class Load:
    """Clients that ask all the time."""

    url: str
    truth: Truth
    seed: int
    longest: int
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    unpaused: list[tuple[float, float]] = field(default_factory=list)
    """Times at which weights were sent to engines that went on generating, as some trainers do."""
    proxy_down: list[tuple[float, float]] = field(default_factory=list)
    checked: int = 0
    tokens: int = 0
    over: bool = False
    sent: int = 0
    crossed: int = 0

    async def run(self, count: int) -> None:
        """Until `over`."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(count)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self.seed} client {number}")
        while not self.over:
            self.sent += 1
            try:
                async with asyncio.timeout(HUNG_SECONDS):
                    outcome = await self._ask(session, rng, self.sent)
            except TimeoutError:
                self.truth.violation("client hung", f"a client waited {HUNG_SECONDS:g} s")
                outcome = "hung"
            self.outcomes[outcome] += 1
            if outcome.startswith(("refused", "proxy")):
                await asyncio.sleep(0.05)

    def _body(self, rng: random.Random) -> tuple[str, list[int], dict[str, Any]]:
        route = rng.choice(ROUTES)
        count = rng.randrange(self.longest // 2, self.longest) if rng.random() < 0.2 else rng.randrange(2, 30)
        words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 40)))
        body: dict[str, Any] = {"model": "tiny"}
        if route == "/inference/v1/generate":
            prompt = encode(words)
            body |= {"token_ids": prompt, "sampling_params": {"max_tokens": count, "ignore_eos": True}}
        else:
            body |= {"max_tokens": count, "ignore_eos": True, "return_weight_versions": True, "return_token_ids": True}
            if route == "/v1/completions":
                prompt = encode(words)
                body["prompt"] = prompt
            else:
                messages = [{"role": "user", "content": words}]
                prompt = encode(render_chat(messages))
                body["messages"] = messages
        if rng.random() < 0.5:
            body["stream"] = True
        return route, prompt, body

    async def _ask(self, session: aiohttp.ClientSession, rng: random.Random, number: int) -> str:
        route, prompt, body = self._body(rng)
        headers = {"X-Session-ID": f"s{rng.randrange(40)}"} if rng.random() < 0.3 else {}
        stream = bool(body.get("stream"))
        loop = asyncio.get_running_loop()
        began = loop.time()
        data = bytearray()
        status = 0
        leave = rng.random() < 0.03
        try:
            async with session.post(self.url + route, json=body, headers=headers) as answer:
                status = answer.status
                engine = answer.headers.get("X-Fleetgate-Engine", "?")
                version = answer.headers.get("X-Fleetgate-Weight-Version", "?")
                async for piece in answer.content.iter_any():
                    data += piece
                    if leave and stream:
                        return "left"
        except (aiohttp.ClientError, ConnectionError) as error:
            if self._proxy_was_down(began):
                return "proxy killed"
            return "broken off" if status == 200 else f"refused {type(error).__name__}"
        if status != 200:
            code = answer.headers.get("X-Fleetgate-Error", "engine's own")
            return f"refused {status} {code}"
        choice = _stream_choice(data) if stream else _json_choice(data)
        if choice is None:
            return "broken off"
        tokens, spans, finish = choice
        ended = loop.time()
        found = Answer(number, route, stream, engine, version, prompt, tokens, spans, finish, began, ended)
        self.answers.append(found)
        if finish != "abort" and len(tokens) != _wanted(body):
            self.truth.violation("short answer", f"{found}: {_wanted(body)} tokens were asked for")
        return "aborted" if finish == "abort" else "whole"

    def _proxy_was_down(self, began: float) -> bool:
        return any(until >= began for _, until in self.proxy_down)

    # The judgement

    def judge(self) -> None:
        """Check every answer given so far against the weights that its label claims."""
        truth = self.truth
        answers, self.answers = self.answers, []
        for answer in answers:
            self.checked += 1
            self.tokens += len(answer.tokens)
            if answer.spans and not answer.again and truth.rank(read_label(answer.spans[-1][0]).version) < 0:
                # The proxy's word about its version may be under way still.
                answer.again = True
                self.answers.append(answer)
                self.checked -= 1
                continue
            if any(start < answer.ended and answer.began < end for start, end in self.unpaused):
                self.crossed += 1
                continue
            self._judge(answer)

    def _judge(self, answer: Answer) -> None:
        truth = self.truth
        # One that says "unfinished" names the weights that the engine had, and nobody may get an answer from others.
        named = [(read_label(label).version, a, b) for label, a, b in answer.spans]
        spans = [(truth.weights.get(label, f"nothing known of {label}"), a, b) for label, a, b in named]
        wrong = check_spans(answer.prompt, answer.tokens, spans)
        if wrong:
            holder = "|".join(
                sorted({w for w in truth.weights.values() if not check_spans(answer.prompt, answer.tokens,
                                                                             [(w, 0, len(answer.tokens))])})
            )  # fmt: skip
            truth.violation(
                "answer from other weights than its label says",
                f"{answer}: {len(wrong)} wrong tokens, the first at {wrong[0]}; all of it is what {holder or '?'} say",
            )
            return
        if not answer.spans:
            return
        claimed = truth.rank(answer.fleet_version)
        for label, _, _ in named:
            rank = truth.rank(label)
            if rank < 0 and label in truth.half_given:
                continue
            if rank < 0:
                truth.violation("answer from weights that were never the fleet's", str(answer))
                return
            if rank < claimed:
                truth.violation("answer from older weights than the fleet's at dispatch", str(answer))
                return


def _wanted(body: dict[str, Any]) -> int:
    return int(body.get("sampling_params", body)["max_tokens"])


Choice = tuple[list[int], list[tuple[str, int, int]], str | None]


def _spans(found: list[dict[str, Any]] | None) -> list[tuple[str, int, int]]:
    return [(each["version"], each["start"], each["end"]) for each in found or []]


def _json_choice(data: bytearray) -> Choice | None:
    item = json.loads(data)
    if item.get("error"):
        return None
    choice = item["choices"][0]
    return choice["token_ids"], _spans(choice["weight_versions"]), choice["finish_reason"]


def _stream_choice(data: bytearray) -> Choice | None:
    """What a whole stream says; None if it is not whole, or says itself that it failed."""
    tokens: list[int] = []
    spans: list[tuple[str, int, int]] = []
    finish: str | None = None
    done = False
    for event in bytes(data).split(b"\n\n"):
        payload = event.removeprefix(b"data: ")
        if not payload or event.startswith(b":"):
            continue
        if payload == b"[DONE]":
            done = True
            continue
        item = json.loads(payload)
        if item.get("error"):
            return None
        for choice in item.get("choices", ()):
            tokens += choice.get("token_ids") or []
            finish = choice.get("finish_reason") or finish
            if choice.get("weight_versions"):
                spans = _spans(choice["weight_versions"])
    return (tokens, spans, finish) if done else None
