"""Chaos: thousands of rollouts through the real proxy while its four engines are killed, frozen, paused and cut.

``python -m tests.scenarios.chaos [--seed N] [--rollouts N]``. Ends with 1 if a client saw an error that the proxy could
have prevented, if an answer's tokens are not those of the weights, or if anything was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from engine_launcher.fleet import EngineFleet, FleetSpec
from tests.tools.process import ProxyProcess, proxy_process
from tests.tools.rollouts import Outcome, Verdict, make

ENGINES = 4
CLIENTS = 40
"""Rollouts at once."""
TORMENTORS = 2
"""Engines in trouble at once; the trainer's pauses come on top."""
TOKENS_PER_SECOND = 60
"""Of one sequence: slow enough that most faults strike inside an answer."""
LONGEST = 160
"""Tokens of the longest rollout."""
ATTEMPTS = 50
"""Of one request. With engines that fail every second or two some unlucky request meets the usual limit of six."""
GROWTH = 24 << 20
"""Bytes by which the proxy's memory may have grown since the first quarter of the run."""
STUCK = 120.0
"""Seconds after which a rollout is reported as hanging."""


@dataclass
class Run:
    """One run of chaos."""

    seed: int
    rollouts: int
    proxy: ProxyProcess
    fleet: EngineFleet
    session: aiohttp.ClientSession
    """For the trainer and the tormentor."""
    users: aiohttp.ClientSession
    """For the rollouts."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    bad: list[Outcome] = field(default_factory=list)
    busy: list[asyncio.Lock] = field(default_factory=lambda: [asyncio.Lock() for _ in range(ENGINES)])
    started: int = 0
    over: bool = False

    async def client(self, number: int) -> None:
        """One of the workers that share the rollouts."""
        rng = random.Random(f"{self.seed} client {number}")
        while self.started < self.rollouts:
            self.started += 1
            rollout = make(rng, longest=LONGEST, model="sim")
            headers = {"X-Session-ID": f"s{rng.randrange(50)}"} if rng.random() < 0.3 else {}
            try:
                async with asyncio.timeout(STUCK):
                    outcome = await rollout.run(self.users, self.proxy.url, headers)
            except TimeoutError:
                outcome = Outcome(Verdict.REFUSED, f"{rollout.path} hung for {STUCK:g} s")
            self.outcomes[outcome.verdict] += 1
            if outcome.verdict in (Verdict.REFUSED, Verdict.WRONG):
                self.bad.append(outcome)
                print(f"  BAD {outcome.verdict}: {outcome.detail}", flush=True)

    # Faults

    async def torment(self, number: int) -> None:
        """One engine after another meets a fault, until the rollouts are through."""
        rng = random.Random(f"{self.seed} torment {number}")
        kinds = [self.kill, self.freeze, self.kill_core, self.pause_one, self.strike, self.strike, self.strike]
        while not self.over:
            free = [index for index in range(ENGINES) if not self.busy[index].locked()]
            index = rng.choice(free)
            async with self.busy[index]:
                with contextlib.suppress(aiohttp.ClientError):
                    await rng.choice(kinds)(index, rng)
            await asyncio.sleep(rng.uniform(0.0, 0.5))

    async def train(self) -> None:
        """Pause and resume through the proxy, as a trainer does around each sync."""
        rng = random.Random(f"{self.seed} train")
        while not self.over:
            await self.pause_all(rng)
            await asyncio.sleep(rng.uniform(0.3, 1.5))

    async def kill(self, index: int, rng: random.Random) -> None:
        """SIGKILL, then a new process on the same port."""
        self.faults["killed"] += 1
        await self.fleet.kill(index)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        await self.fleet.restart(index)

    async def kill_core(self, index: int, rng: random.Random) -> None:
        """The engine process dies behind its API server, which answers 500 and ends a second later."""
        self.faults["engine process killed"] += 1
        await self._engine(index, "/sim/kill_engine")
        await asyncio.sleep(rng.uniform(1.2, 2.0))
        await self.fleet.restart(index)

    async def freeze(self, index: int, rng: random.Random) -> None:
        """SIGSTOP for a while: connections stay, nothing moves."""
        self.faults["frozen"] += 1
        self.fleet.freeze(index)
        await asyncio.sleep(rng.uniform(0.3, 3.0))
        self.fleet.thaw(index)

    async def pause_all(self, rng: random.Random) -> None:
        """What a trainer does, through the proxy."""
        mode = rng.choice(["keep", "abort", "wait"])
        self.faults[f"paused ({mode})"] += 1
        async with self.session.post(f"{self.proxy.url}/pause?mode={mode}") as answer:
            self.faults[f"pause answered {answer.status}"] += 1
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await self.resume()

    async def resume(self) -> None:
        """Until it worked, as every trainer's finally does."""
        while True:
            async with self.session.post(f"{self.proxy.url}/resume") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)

    async def pause_one(self, index: int, rng: random.Random) -> None:
        """Somebody pauses one engine behind the proxy's back."""
        mode = rng.choice(["keep", "abort", "wait"])
        self.faults[f"paused behind its back ({mode})"] += 1
        await self._engine(index, f"/pause?mode={mode}")
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await self._engine(index, "/resume")

    async def strike(self, index: int, rng: random.Random) -> None:
        """A few answers of one engine go wrong, each in its own way."""
        action = rng.choice(["cut", "reset", "cut", "reset", "busy", "busy event", "garbage", "delay", "engine error"])
        rule: dict[str, object] = {"path": "/v1/*", "times": rng.randrange(1, 6)}
        if action in ("cut", "reset"):
            rule["action"] = action
            where = rng.choice(["start", "tokens", "bytes"])
            if where == "tokens":
                rule["after_tokens"] = rng.randrange(0, 40)
            elif where == "bytes":
                rule["after_bytes"] = rng.randrange(0, 2000)
        elif action == "busy":
            message = "The engine is currently busy and cannot accept new requests."
            body = {"error": {"message": message, "type": "Service Unavailable", "param": None, "code": 503}}
            rule |= {"action": "status", "status": 503, "body": body}
        elif action == "busy event":
            rule |= {"action": "error_event", "status": 503, "after_tokens": 0}
        elif action == "engine error":
            # As the first event a live engine's 500 is about the request and belongs to the client.
            rule |= {"action": "error_event", "status": 500, "after_tokens": rng.randrange(1, 30)}
        elif action == "garbage":
            rule["action"] = "garbage"
        else:
            rule |= {"action": "delay", "seconds": rng.uniform(0.1, 1.0)}
        self.faults[f"{action} at some answers"] += 1
        await self._engine(index, "/sim/faults", [rule])

    async def _engine(self, index: int, path: str, body: object = None) -> None:
        url = self.fleet.urls[index] + path
        async with self.session.post(url, data=json.dumps(body) if body is not None else None) as answer:
            await answer.read()

    # The end

    async def settle(self) -> list[str]:
        """Wait until all is quiet; returns what was left behind."""
        deadline = time.monotonic() + 30
        while True:
            fleet = await self.proxy.fleet(self.session)
            left = {
                "in flight": sum(engine["inflight"] for engine in fleet["engines"]),
                "held": fleet["gate"]["held_requests"],
                "held bytes": fleet["gate"]["held_bytes"],
                "not ready": sum(engine["state"] != "ready" for engine in fleet["engines"]),
                "metric in flight": await self.proxy.metric(self.session, "fleetgate_inflight_requests"),
                "metric held": await self.proxy.metric(self.session, "fleetgate_held_requests"),
            }
            if not any(left.values()) or time.monotonic() > deadline:
                return [f"{name}: {value}" for name, value in left.items() if value]
            await asyncio.sleep(0.2)


async def chaos(seed: int, rollouts: int) -> int:
    """One run; returns the exit code."""
    print(f"seed {seed}: {rollouts} rollouts over {ENGINES} engines, {CLIENTS} at once", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as logs:
        spec = FleetSpec(
            kind="sim", count=ENGINES, log_dir=Path(logs), extra=("--tokens-per-second", str(TOKENS_PER_SECOND))
        )
        limits = aiohttp.ClientTimeout(total=None)
        async with (
            EngineFleet(spec) as fleet,
            proxy_process(*fleet.urls, probe_interval=0.5, max_attempts=ATTEMPTS) as proxy,
            aiohttp.ClientSession(timeout=limits) as session,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as users,
        ):
            run = Run(seed, rollouts, proxy, fleet, session, users)
            files = proxy.files
            clients = [asyncio.ensure_future(run.client(number)) for number in range(CLIENTS)]
            torment = asyncio.gather(*[run.torment(number) for number in range(TORMENTORS)], run.train())
            memory = 0
            while not all(client.done() for client in clients):
                await asyncio.wait(clients, timeout=5)
                done = run.outcomes.total()
                if not memory and done > rollouts // 4:
                    memory = proxy.memory
                print(f"  {time.monotonic() - began:5.0f} s: {done} rollouts, {dict(run.outcomes)}", flush=True)
            run.over = True
            await torment
            await users.close()
            await run.resume()
            left = await run.settle()
            grown = proxy.memory - memory
            await asyncio.sleep(3)  # idle engine connections are closed after two seconds
            more_files = proxy.files - files
            retries = await proxy.metric(session, "fleetgate_retries_total")
            held = await proxy.metric(session, "fleetgate_hold_seconds_count")
            errors = [line for line in proxy.lines if " ERROR " in line or "Traceback" in line]
    print(f"faults: {dict(run.faults)}")
    print(f"outcomes: {dict(run.outcomes)}; re-sent {retries:.0f} times, held {held:.0f} times")
    print(f"memory {grown / (1 << 20):+.1f} MiB, open files {more_files:+d}, {time.monotonic() - began:.0f} s")
    problems = [f"{outcome.verdict}: {outcome.detail}" for outcome in run.bad] + left + errors[:10]
    if run.outcomes.total() != rollouts + CLIENTS - 1 and run.outcomes.total() < rollouts:
        problems.append(f"only {run.outcomes.total()} rollouts ended")
    if grown > GROWTH:
        problems.append(f"memory grew by {grown} bytes")
    # The few that stay: one probe connection an engine, and this program's own.
    if more_files > 2 * ENGINES + 2:
        problems.append(f"{more_files} more open files")
    for problem in problems[:20]:
        print(f"FAILED {problem}")
    print("chaos passed" if not problems else f"chaos failed (seed {seed})")
    return 1 if problems else 0


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--rollouts", type=int, default=2000)
    options = parser.parse_args()
    return asyncio.run(chaos(options.seed, options.rollouts))


if __name__ == "__main__":
    sys.exit(main())
