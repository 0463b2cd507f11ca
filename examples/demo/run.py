"""One run: start everything, sync weights under load in each mode, stop, then judge every token."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack

import aiohttp

from engine_launcher.errors import LauncherError
from engine_launcher.sim.model import base_weights
from engine_launcher.trainer_process import TrainerProcess
from engine_launcher.vllm_engine import locate
from examples.demo.judge import Judge, RealJudge, SimulatedJudge, Verdict, validate
from examples.demo.report import Result
from examples.demo.rollouts import RolloutPool
from examples.demo.settings import DemoFailed, DemoSpec
from examples.demo.stack import Stack, say
from examples.demo.syncs import Control, RealTrainer, SimulatedTrainer, Sync, Trainer, sync_weights


async def run(spec: DemoSpec) -> Result:
    """The whole demo; raises ``DemoFailed`` or ``LauncherError`` when it cannot go on."""
    begun = time.monotonic()
    async with AsyncExitStack() as cleanup:
        say(f"starting {spec.engines} {spec.engine} engines and the proxy (logs in {spec.run_dir})")
        stack = await cleanup.enter_async_context(Stack(spec))
        session = await cleanup.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        control = Control(session, stack.url)
        trainer, judge = await _trainer(spec, stack, control, cleanup)
        world_size = await trainer.init()
        model = (await control.get("/v1/models"))["data"][0]["id"]
        started = time.monotonic()
        say(f"everything runs after {started - begun:.1f} s: {stack.url} is {spec.engines} engines")

        lengths = (spec.pace.shortest, spec.pace.longest)
        pool = RolloutPool(session, stack.url, model, spec.in_flight, lengths)
        cleanup.push_async_callback(pool.cancel)
        try:
            async with asyncio.timeout(spec.pace.limit):
                syncs = await _sync_under_load(spec, control, trainer, pool)
        except TimeoutError:
            raise DemoFailed(f"not done after {spec.pace.limit:g} s; see {spec.run_dir}/proxy.log") from None
        ran = time.monotonic()
        # The judge needs the processor more than idle engines do.
        await stack.stop()

        say("judging every token")
        judging = time.monotonic()
        verdicts: dict[str, Verdict] = {}
        for mode in spec.modes:
            done = [each for each in pool.finished if each.mode == mode]
            verdicts[mode] = await validate(judge, done, trainer.weights)
        return Result(
            spec=spec,
            world_size=world_size,
            start_seconds=started - begun,
            run_seconds=ran - started,
            validate_seconds=time.monotonic() - judging,
            rollouts=pool.finished,
            errors=pool.errors,
            syncs=syncs,
            verdicts=verdicts,
        )


async def _trainer(spec: DemoSpec, stack: Stack, control: Control, cleanup: AsyncExitStack) -> tuple[Trainer, Judge]:
    if spec.engine == "sim":
        simulated = SimulatedTrainer(control, base_weights(0))
        cleanup.push_async_callback(simulated.stop)
        return simulated, SimulatedJudge()
    say("starting the trainer: torch and vLLM's HTTPVLLMWeightSyncClient, pointed at the proxy")
    python = locate(spec.vllm, os.environ)
    process = TrainerProcess(python, spec.model, [stack.url], log=spec.run_dir / "trainer.log")
    try:
        await cleanup.enter_async_context(process)
    except TimeoutError:
        raise LauncherError(f"the trainer did not start; see {spec.run_dir}/trainer.log") from None
    return RealTrainer(control, process), RealJudge(process)


async def _sync_under_load(spec: DemoSpec, control: Control, trainer: Trainer, pool: RolloutPool) -> list[Sync]:
    syncs: list[Sync] = []
    for mode in spec.modes:
        pool.start(mode)
        for index in range(1, spec.syncs + 1):
            await pool.more(spec.sync_every)
            sync = await sync_weights(control, trainer, mode, f"{mode}-{index}", pool.running)
            syncs.append(sync)
            say(
                f"  {mode:5} sync {index:2} of {spec.syncs}: paused {sync.window * 1000:7.1f} ms, the slowest engine's "
                f"own part {sync.engines * 1000:7.1f} ms; {len(pool.finished)} rollouts, {len(pool.errors)} errors"
            )
        # The last weights make tokens too, and no rollout sees two modes.
        await pool.more(spec.sync_every)
        await pool.finish()
    return syncs
