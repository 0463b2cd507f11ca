"""The order that the simulator found, measured on real requests: ``python -m benchmarks.simulate.live``.

Four simulated engines, one of them five times slower, behind the real proxy; agents with growing prompts. In a round
every policy gets the same sessions, in an order that rotates from round to round, so that neither a lucky trace nor a
busy minute of the machine makes the order. One to three minutes a policy and round; ``--resume`` goes on with a run
that was cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from benchmarks.simulate import traces
from benchmarks.simulate.policies import POLICIES as SIMULATED
from benchmarks.simulate.world import Result, World

POLICIES = ("sticky", "prefix", "consistent_hash", "least_inflight", "power_of_two", "round_robin")
ENGINES = 4
SLOWDOWN = 5.0
START_SECONDS = 60.0
SIMULATED_ROUNDS = 15
"""Rounds of the simulator, where one costs a second and not ten minutes."""


def _session(number: int, seed: int) -> list[tuple[list[int], int, float]]:
    """Turns: the whole prompt, tokens to generate, seconds of tools afterwards. All a tenth of the simulator's."""
    random = Random(f"{seed}/{number}")
    system = Random(f"system/{random.randrange(4)}")
    prompt = [system.randrange(250) for _ in range(400)]
    turns = []
    for _ in range(2 + min(20, int(random.expovariate(1 / 6)))):
        size = min(600, max(20, int(random.lognormvariate(0, 0.8) * 150)))
        prompt = [*prompt, *(random.randrange(250) for _ in range(size))]
        answer = min(200, max(5, int(random.lognormvariate(0, 0.9) * 25)))
        turns.append((prompt, answer, min(3.0, random.lognormvariate(0, 1.0) * 0.3)))
    return turns


@contextlib.asynccontextmanager
async def _process(*command: str, stderr: bool = False) -> AsyncIterator[tuple[Process, str]]:
    """A child process and the URL that it says it listens on."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=None if stderr else PIPE, stderr=PIPE if stderr else None
    )
    drain: asyncio.Future[Any] | None = None
    try:
        stream = child.stderr if stderr else child.stdout
        assert stream is not None
        async with asyncio.timeout(START_SECONDS):
            while b"http://" not in (line := await stream.readline()) or (stderr and b"listening on" not in line):
                if not line:
                    raise SystemExit(f"{command[0]} ended before it was ready")
        drain = asyncio.ensure_future(stream.read())
        yield child, line.decode().split()[-1]
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        if drain is not None:
            await drain


async def _one(policy: str, sessions: int, concurrency: int, seed: int) -> Result:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                _process("benchmarks.simulate.live_engine", "--slowdown", str(SLOWDOWN if not n else 1.0))
            )
            for n in range(ENGINES)
        ]
        flags = [flag for _, url in engines for flag in ("--engine", url)]
        _, url = await stack.enter_async_context(
            _process("proxy", *flags, "--port", "0", "--policy", policy, stderr=True)
        )
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        )
        return await _load(client, url, policy, sessions, concurrency, seed)


async def _load(
    client: aiohttp.ClientSession, url: str, policy: str, sessions: int, concurrency: int, seed: int
) -> Result:
    result = Result(policy, "live", ENGINES)
    slots = asyncio.Semaphore(concurrency)
    hit = tokens = 0
    begun = time.perf_counter()

    async def rollout(number: int) -> None:
        nonlocal hit, tokens
        turns = _session(number, seed)
        key = f"session-{number}"
        async with slots:
            started = time.perf_counter()
            home = None
            for prompt, answer, tools in turns:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": answer, "ignore_eos": True}
                async with client.post(f"{url}/v1/completions", json=body, headers={"X-Session-ID": key}) as response:
                    await response.read()
                    if response.status != 200:
                        raise SystemExit(f"{policy}: status {response.status}: {(await response.text())[:300]}")
                    found, of = response.headers["X-Sim-Hit"].split("/")
                    engine = response.headers["X-Fleetgate-Engine"]
                hit += int(found)
                tokens += int(of)
                result.requests += 1
                result.moves += home not in (None, engine)
                home = engine
                await asyncio.sleep(tools)
            result.completions.append(time.perf_counter() - started)
            async with client.post(f"{url}/finish_session", params={"session_id": key}):
                pass

    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(rollout(number))
    result.makespan = time.perf_counter() - begun
    result.hits = hit / tokens
    return result


def simulated(policy: str, sessions: int, concurrency: int, seed: int) -> dict[str, Any]:
    """The simulator's word on the same: its trace `slow` with as many engines, sessions and rollouts at once."""
    trace = traces.make("slow", ENGINES, sessions // ENGINES, seed)
    trace.concurrency = concurrency
    return World(trace, SIMULATED[policy](), policy, ENGINES).run().row() | {"seed": seed}


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the rounds, the best mean first; the lowest and the highest mean beside it."""
    out = [
        "| policy | mean | lowest to highest | p90 | p99 | makespan | prefix hits | moves |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    by_policy = {row["policy"]: [each for each in rows if each["policy"] == row["policy"]] for row in rows}
    lines = []
    for policy, runs in by_policy.items():
        means = sorted(run["mean"] for run in runs)
        mid = {name: median(run[name] for run in runs) for name in ("mean", "p90", "p99", "makespan", "hits", "moves")}
        spread = f"{means[0]:.1f} to {means[-1]:.1f}"
        row = [policy, f"{mid['mean']:.1f}", spread, *(f"{mid[name]:.1f}" for name in ("p90", "p99", "makespan"))]
        row += [f"{mid['hits']:.0%}", f"{mid['moves']:.0f}"]
        lines.append((mid["mean"], f"| {' | '.join(row)} |"))
    return "\n".join([*out, *(line for _, line in sorted(lines))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.live", description=__doc__)
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--sessions", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each further round has the next one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut off")
    parser.add_argument(
        "--runs", type=Path, default=Path(".run/balancing-live.jsonl"), help="each run, once it is there"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        args.runs.unlink(missing_ok=True)
    rows = [json.loads(line) for line in args.runs.read_text().splitlines()] if args.runs.exists() else []
    done = {(row["policy"], row["seed"]) for row in rows}
    for turn in range(args.rounds):
        seed = args.seed + turn
        for number in range(len(args.policies)):
            policy = args.policies[(number + turn) % len(args.policies)]
            if (policy, seed) in done:
                continue
            row = asyncio.run(_one(policy, args.sessions, args.concurrency, seed)).row() | {"seed": seed}
            rows.append(row)
            with args.runs.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"seed {seed} {policy}: mean {row['mean']:.1f} p99 {row['p99']:.1f}", file=sys.stderr, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "balancing-live.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    seeds = range(args.seed, args.seed + SIMULATED_ROUNDS)
    rows = [simulated(policy, args.sessions, args.concurrency, seed) for policy in args.policies for seed in seeds]
    print(f"The simulator on as many sessions, {SIMULATED_ROUNDS} rounds:\n\n{table(rows)}")


if __name__ == "__main__":
    main()
