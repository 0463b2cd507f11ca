"""Command line and environment of a real vLLM server, on a GPU or on a CPU."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_launcher.cpu_transfer import BACKEND
from engine_launcher.errors import UsageError
from engine_launcher.gpus import ORDER, PCI_ORDER, VISIBLE, parallel_arguments
from engine_launcher.restore import Checkpoint
from engine_launcher.settings import EngineCommand, EngineSpec, flag_value, has_flag

VLLM_VARIABLE: Final = "FLEETGATE_VLLM"
"""Environment variable that names a vLLM as ``--vllm`` does."""

BUILT: Final = Path(".engine")
"""What ``make engine`` builds, looked for in the working directory and beside this package."""

RECORD: Final = "fleetgate-engine.json"
"""What that build says about itself, so that starting engines need not import torch to ask."""

OLDEST: Final = (0, 33)
"""First vLLM that rejects requests while paused and reports weight versions on every route; see docs/adr/0003."""

PROBE_TIMEOUT: Final = 300.0
"""Seconds to import torch in a vLLM environment: a minute on a cold network disk, with room to spare."""

KEEP_ALIVE: Final = "120"
"""Seconds that a server keeps an idle connection. vLLM's default of 5 closes pooled connections under their users."""

FIXED_FLAGS: Final = ("--host", "--port", "--model", "--uds")
"""Flags that the launcher itself decides on for each engine."""

CPU_FLAGS: Final = (
    ("--enforce-eager", None),  # compiling takes minutes and gains nothing for a small model
    ("--dtype", "float32"),  # greedy choices then compare exactly with a reference, and no CPU is slower for it
    ("--max-model-len", "2048"),  # bounds the cache below
    ("--max-num-seqs", "64"),
)
"""Flags on a CPU, each unless the user gives the same one."""

CPU_ENVIRONMENT: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes 40 % of the memory, for each engine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share cores; bound threads would all sit on the first ones
}

_PROBE: Final = """
import importlib.metadata, json, torch
names = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
points = {each.name for each in importlib.metadata.entry_points(group="vllm.general_plugins")}
print(json.dumps({"vllm": names.get("vllm") or names.get("vllm-cpu") or "",
                  "device": "gpu" if torch.cuda.is_available() else "cpu",
                  "plugin": "fleetgate_cpu_transfer" in points}))
"""


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """A vLLM that engines can be started with."""

    python: Path
    version: str
    device: str
    """``gpu`` or ``cpu``."""
    plugin: bool
    """Whether this project's CPU weight-transfer backend is installed there."""


def locate(given: Path | None, environ: Mapping[str, str]) -> Path:
    """The Python executable that has vLLM: the one given, else ``FLEETGATE_VLLM``, else what ``make engine`` built.

    Raises ``UsageError`` when there is none.
    """
    if given is None and environ.get(VLLM_VARIABLE):
        given = Path(environ[VLLM_VARIABLE])
    if given is not None:
        inside = given / "bin" / "python"
        found = inside if given.is_dir() else given
        if not (found.is_file() and os.access(found, os.X_OK)):
            raise UsageError(f"--vllm {given} is neither a Python executable nor a virtual environment with bin/python")
        return found.absolute()
    for base in (Path.cwd(), Path(__file__).resolve().parent.parent):
        found = base / BUILT / "bin" / "python"
        if found.exists() and (base / BUILT / RECORD).exists():
            return found
    raise UsageError(
        "no vLLM found: build one for the CPU with `make engine`, or name yours with --vllm PATH (a Python executable "
        f"or a virtual environment) or {VLLM_VARIABLE}; --kind sim needs none"
    )


def parse_install(python: Path, text: str) -> VllmInstall:
    """What the probe printed, checked for its version; raises ``UsageError`` when vLLM is missing or too old."""
    found = json.loads(text)
    version = str(found["vllm"])
    numbers = tuple(int(each) for each in version.split(".")[:2] if each.isdigit())
    wanted = ".".join(map(str, OLDEST))
    if not version:
        raise UsageError(f"{python} has no vLLM: install vllm>={wanted} there, or name another with --vllm")
    if numbers < OLDEST:
        raise UsageError(f"{python} has vLLM {version}, but {wanted} or newer is needed; name another with --vllm")
    return VllmInstall(python, version, str(found["device"]), bool(found["plugin"]))


async def probe(python: Path) -> VllmInstall:
    """Ask a vLLM environment what it is; raises ``UsageError`` when it has no usable vLLM."""
    record = python.parent.parent / RECORD
    if record.is_file():
        return parse_install(python, record.read_text())
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", _PROBE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PROBE_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UsageError(f"{python} did not import torch within {PROBE_TIMEOUT:g} s") from None
    if process.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-3:]
        raise UsageError(f"{python} cannot import torch, so it has no usable vLLM:\n  " + "\n  ".join(last))
    return parse_install(python, out.decode().splitlines()[-1])


def backend_of(install: VllmInstall) -> str:
    """Weight-transfer backend when the user names none: NCCL where there are GPUs."""
    return BACKEND if install.device == "cpu" else "nccl"


def vllm_command(
    spec: EngineSpec,
    install: VllmInstall,
    port: int,
    devices: tuple[str, ...] = (),
    restored: Checkpoint | None = None,
) -> EngineCommand:
    """How to start one vLLM server on ``port``.

    Args:
        spec: what is started.
        install: with which vLLM.
        port: where it listens.
        devices: the GPUs that are its own; none on a CPU.
        restored: a checkpoint to load in place of ``spec.model``, under whose name it is served all the same.

    Raises ``UsageError`` for extra arguments that the launcher itself decides on, or for a missing plugin.
    """
    _check_extra(spec.extra)
    assert spec.model is not None
    base = str(spec.model.absolute())
    # The module, not the `vllm` script: that one looks for a distribution of its own name, which CPU builds lack, and
    # starts several API servers for a data-parallel engine, each with a pause of its own.
    argv = [str(install.python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", base if restored is None else str(restored.path.absolute())]
    if restored is not None:
        if not has_flag(spec.extra, "--served-model-name"):
            argv += ["--served-model-name", base]
        if not restored.has_tokenizer and not has_flag(spec.extra, "--tokenizer"):
            argv += ["--tokenizer", base]
    argv += ["--host", spec.host, "--port", str(port)]
    argv += parallel_arguments(len(devices), spec.extra)
    if not has_flag(spec.extra, "--enable-scale-out"):
        argv.append("--enable-scale-out")  # /inference/v1/generate answers 403 without it
    if not has_flag(spec.extra, "--weight-transfer-config"):
        if backend_of(install) == BACKEND and not install.plugin:
            raise UsageError(
                f"{install.python} lacks this project's CPU weight-transfer backend: install it there with "
                "`pip install --no-deps fleetgate`, or name another with -- --weight-transfer-config"
            )
        argv += ["--weight-transfer-config", json.dumps({"backend": backend_of(install)})]
    if install.device == "cpu":
        for flag, value in CPU_FLAGS:
            if not has_flag(spec.extra, flag):
                argv += [flag] if value is None else [flag, value]
    return EngineCommand((*argv, *spec.extra), vllm_environment(spec, install, os.environ, devices))


def _check_extra(extra: tuple[str, ...]) -> None:
    for flag in FIXED_FLAGS:
        if has_flag(extra, flag):
            raise UsageError(
                f"{flag} among the extra vLLM arguments: the launcher sets it for each engine; use its own"
            )
    servers = flag_value(extra, "--api-server-count", "-asc")
    if servers not in (None, "1"):
        raise UsageError(
            f"--api-server-count {servers}: each of several API servers would keep a pause and a weight version of its "
            "own, so that a call reaches one of them only; leave it out, and start more engines instead"
        )


def vllm_environment(
    spec: EngineSpec, install: VllmInstall, base: Mapping[str, str], devices: tuple[str, ...] = ()
) -> dict[str, str]:
    """Environment of a server: what the user has set wins over the launcher's choices, its GPUs excepted."""
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",  # the control routes exist only so
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local directory; nothing is to be looked up elsewhere
        "PYTHONUNBUFFERED": "1",
    }
    if has_flag(spec.extra, "--enable-lora"):
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"  # else /v1/load_lora_adapter is not there
    if install.device == "cpu":
        threads = max(1, (os.cpu_count() or 1) // (2 * spec.share))
        ours |= CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    found = {**ours, **base, **spec.environment}
    if devices:
        found[VISIBLE] = ",".join(devices)
        if devices[0].isdecimal():
            found.setdefault(ORDER, PCI_ORDER)
    # Tools that vLLM calls (ninja, compilers' helpers) are the ones of its own environment.
    found["PATH"] = os.pathsep.join([str(install.python.parent), found.get("PATH", os.defpath)])
    # The launcher's own environment must not leak in: it would shadow packages there.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        if name not in spec.environment:
            found.pop(name, None)
    return found
