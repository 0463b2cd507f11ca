"""The stage of the GPU run: engines, proxies and trainers, real or simulated."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import old_nccl
import rig
from rig import Control, RunFailed, Server, Trainer, say

from engine_launcher.ports import free_ports

MODEL: Final = "policy"

SHAPES: Final = {
    "0.7b": {"hidden": 2048, "intermediate": 5632, "layers": 16, "heads": 16, "kv-heads": 4, "head-dim": 128},
    "7b": {"hidden": 4096, "intermediate": 14336, "layers": 30, "heads": 32, "kv-heads": 8, "head-dim": 128},
}
KV_BYTES: Final = 32 * 2**30
"""Key-value cache of an engine: a million tokens of the 0.7 B model, 260,000 of the 7 B one. Given outright, so that engines may start beside one
another on one GPU: vLLM's own measurement of free memory takes the neighbour's weights for its own."""

FILES: Final = 65536
"""Open files of each process: a proxy holds two connections a rollout."""


@dataclass
class Options:
    """What the run is told."""

    sim: bool
    gpus: int
    out: Path
    scale: float
    """Length of the phases, 1 for the real run."""
    size: str = "0.7b"
    deadline: float = 0.0
    work: Path = Path("/tmp/gpu/work")
    sim_rate: float = 40.0
    clients: int = 8
    in_flight: tuple[int, ...] = (512, 2048)
    """Rollouts in flight where both routes are measured at once."""
    forms: tuple[bool, ...] = (True, False)
    """Whether they are streamed."""
    turns: tuple[int, ...] = (512, 2048)
    """Rollouts in flight where the routes come in turn."""
    turn_forms: tuple[bool, ...] = (True, False)
    rounds: int = 1
    """How often the routes come in turn."""
    phases: str = ""


@dataclass
class Stage:
    """All that runs."""

    options: Options
    session: aiohttp.ClientSession
    python: str = sys.executable
    engines: list[Server] = field(default_factory=list)
    """The fleet: one a GPU."""
    spares: dict[str, Server] = field(default_factory=dict)
    """Further servers: engines with another transfer backend, proxies, trainers."""
    backend: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """Of every process."""
        return {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not there
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # ipc handles travel pickled
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # else gloo looks its own host name up, which need not resolve
            "PYTHONPATH": os.pathsep.join([str(rig.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def engine(self, name: str, gpu: int, backend: str, **env: str) -> Server:
        """A server, not yet started."""
        port = free_ports("127.0.0.1", 1)[0]
        if self.options.sim:
            argv = [self.python, "-m", "engine_launcher.sim", "--port", str(port), "--model-name", MODEL]
            argv += ["--tokens-per-second", str(self.options.sim_rate), "--max-num-seqs", "1024"]
            server = Server(name, argv, self.env, self.options.work)
        else:
            argv = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
            argv += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
            argv += ["--attention-backend", "FLASH_ATTN", "--gpu-memory-utilization", "0.3", "--enable-scale-out"]
            argv += ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-num-seqs", "1536", "--max-model-len", "4096"]
            argv += ["--weight-transfer-config", json.dumps({"backend": backend}), "--disable-uvicorn-access-log"]
            server = Server(name, argv, {**self.env, "CUDA_VISIBLE_DEVICES": str(gpu)} | env, self.options.work)
        server.url = f"http://127.0.0.1:{port}"
        return server

    @property
    def model(self) -> Path:
        """Directory of the model."""
        return self.options.work / f"model-{self.options.size}"

    async def make_model(self) -> None:
        """Random weights of seed 0, made here."""
        if self.options.sim or self.model.exists():
            return
        shape = {name.replace("-", "_"): value for name, value in SHAPES[self.options.size].items()}
        argv = [self.python, str(rig.HERE / "weights.py"), str(self.model), "--shape", json.dumps(shape)]
        maker = Server("make-model", argv, self.env, self.options.work)
        await maker.start()
        assert maker.process is not None
        if await asyncio.wait_for(maker.process.wait(), 180) != 0:
            raise RunFailed(f"no model: {maker.tail()}")

    async def raise_engines(self) -> None:
        """The fleet, and what takes part in NCCL: engines on all GPUs but the trainer's, and one left as vLLM makes it.

        Trainers load their weights meanwhile; they join later.
        """
        started = time.monotonic()
        await self.make_model()
        say(f"model made in {time.monotonic() - started:.0f} s")
        gpus, phases = self.options.gpus, self.options.phases
        self.backend = "sim" if self.options.sim else "ipc"
        self.engines = [self.engine(f"engine-{gpu}", gpu, self.backend) for gpu in range(gpus)]
        if "n" in phases:
            for gpu in range(1, gpus):
                self.spares[f"nccl-{gpu}"] = self.engine(f"nccl-{gpu}", gpu, "nccl")
            self.spares["plain"] = self.engine("plain", gpus - 1, "nccl", **{old_nccl.OFF: "1"})
        everyone = [*self.engines, *self.spares.values()]
        for each in everyone:
            await each.start()
        if "n" in phases:
            await self.trainer("trainer-nccl", "nccl", [0], wait=False)
        if set(phases) & set("bcd"):
            await self.trainer("trainer", self.backend, list(range(gpus)), wait=False)
        await asyncio.gather(*(each.healthy(self.session, rig.ENGINE_WAIT) for each in everyone))
        self.facts["engines_up_seconds"] = round(time.monotonic() - started, 1)
        say(f"{len(everyone)} engines up after {self.facts['engines_up_seconds']} s")

    @property
    def urls(self) -> list[str]:
        """Of the fleet."""
        return [each.url for each in self.engines]

    async def proxy(self, name: str, urls: list[str], *extra: str) -> Server:
        """A proxy in front of engines; what ran under that name ends."""
        await self.drop(name)
        port = free_ports("127.0.0.1", 1)[0]
        argv = [self.python, "-m", "proxy", "--port", str(port), "--log-format", "json", *extra]
        for each in urls:
            argv += ["--engine", each]
        server = Server(name, argv, self.env, self.options.work)
        server.url = f"http://127.0.0.1:{port}"
        self.spares[name] = server
        await server.start()
        await server.healthy(self.session, rig.PROXY_WAIT)
        control = Control(server.url, self.session)
        end = time.monotonic() + rig.PROXY_WAIT
        while (await control.get("/fleet"))["ready"] < len(urls):
            if time.monotonic() > end:
                raise RunFailed(f"{name}: not all engines are ready: {await control.get('/fleet')}")
            await asyncio.sleep(0.1)
        return server

    async def trainer(self, name: str, backend: str, devices: list[int], *, wait: bool = True) -> Trainer:
        """A trainer, with its weights unless told not to wait, not yet joined."""
        await self.drop(name)
        argv = [self.python, str(rig.HERE / "trainer.py"), "--model", str(self.model)]
        argv += ["--backend", "sim" if self.options.sim else backend]
        for each in devices:
            argv += ["--device", str(each)]
        server = Trainer(name, argv, self.env, self.options.work, pipes=True)
        self.spares[name] = server
        await server.start()
        if wait:
            await server.ready()
        return server

    async def death(self) -> None:
        """Raise as soon as a process ends that nobody meant to end; otherwise for ever."""
        seen: set[Server] = set()
        while True:
            for each in [*self.engines, *self.spares.values()]:
                if each.alive:
                    seen.add(each)
                elif each in seen and not each.ending:
                    each.check()
            await asyncio.sleep(0.5)

    async def drop(self, name: str) -> None:
        """End a spare."""
        old = self.spares.pop(name, None)
        if old is not None and old.process is not None:
            old.kill()
            await old.process.wait()

    async def end(self) -> None:
        """End everything."""
        everyone = [*self.engines, *self.spares.values()]
        for each in everyone:
            each.kill()
        await asyncio.gather(*(each.process.wait() for each in everyone if each.process), return_exceptions=True)

    def versions(self) -> dict[str, Any]:
        """Of what was measured."""
        names = ["aiohttp", "uvloop", "httptools"]
        if not self.options.sim:
            names += ["vllm", "torch", "transformers"]
        found: dict[str, Any] = {each: rig.version_of(each, self.python, self.env) for each in names}
        if not self.options.sim:
            argv = [self.python, str(rig.HERE / "old_nccl.py")]
            done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False)
            found |= json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"nccl": done.stderr[-300:]}
        return found


def more_files() -> None:
    """Raise the limit of open files for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
