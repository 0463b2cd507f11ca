"""Which GPUs an engine gets: those that this process may see, divided in order, none given twice.

GPUs of one engine are neighbours in the order in which the machine counts them, because neighbours share the faster
links on most machines.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from engine_launcher.errors import UsageError
from engine_launcher.settings import flag_value

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""CUDA's own variable: a list of indices, or of ids such as ``GPU-...`` and ``MIG-...``."""

ORDER: Final = "CUDA_DEVICE_ORDER"

PCI_ORDER: Final = "PCI_BUS_ID"
"""The order of ``nvidia-smi``. CUDA's default puts the fastest first, so index 0 may then be another card."""

SMI_TIMEOUT: Final = 60.0
"""Seconds for ``nvidia-smi``: without its daemon it initialises every card first, some seconds each."""

PARALLEL: Final = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
"""vLLM's flags whose product is the number of GPUs of a server."""


def sizes(extra: tuple[str, ...]) -> int:
    """GPUs that a server with these arguments needs: the product of its parallel sizes.

    Raises ``UsageError`` for a size that is no number.
    """
    product = 1
    for flags in PARALLEL:
        value = flag_value(extra, *flags)
        if value is None:
            continue
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{flags[0]} {value!r} must be a number from 1 on")
        product *= int(value)
    return product


def wanted(gpus: int | None, extra: tuple[str, ...]) -> int:
    """GPUs of one engine: as many as were asked for, else what its parallel sizes need.

    Raises ``UsageError`` where the two contradict each other.
    """
    needed = sizes(extra)
    if gpus is None:
        return needed
    told = any(flag_value(extra, *flags) is not None for flags in PARALLEL)
    if told and gpus != needed:
        raise UsageError(
            f"--gpus-per-engine {gpus} does not fit the parallel sizes among the engine's arguments, which need "
            f"{needed}; leave one of the two out"
        )
    return gpus


def parallel_arguments(gpus: int, extra: tuple[str, ...]) -> list[str]:
    """What makes an engine use ``gpus`` of them, where its arguments do not say how."""
    told = any(flag_value(extra, *flags) is not None for flags in PARALLEL)
    return ["--tensor-parallel-size", str(gpus)] if gpus > 1 and not told else []


def read_visible(text: str) -> tuple[str, ...]:
    """The devices of a ``CUDA_VISIBLE_DEVICES``: as CUDA reads it, what follows an invalid entry does not count.

    Raises ``UsageError`` for one that is named twice, which CUDA refuses with a bare error number.
    """
    found: list[str] = []
    for raw in text.split(","):
        each = raw.strip()
        if not each or each.startswith("-"):
            break
        if each in found:
            raise UsageError(f"{VISIBLE}={text} names {each} twice; name each GPU once")
        found.append(each)
    return tuple(found)


async def visible(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that may be used here: those of ``CUDA_VISIBLE_DEVICES``, else all that ``nvidia-smi`` lists."""
    if VISIBLE in environ:
        return read_visible(environ[VISIBLE])
    smi = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if smi is None:
        return ()
    process = await asyncio.create_subprocess_exec(
        smi,
        "--query-gpu=index",
        "--format=csv,noheader",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), SMI_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UsageError(f"{smi} did not answer within {SMI_TIMEOUT:g} s; name the GPUs with {VISIBLE}") from None
    if process.returncode != 0:
        said = (err or out).decode(errors="replace").strip()
        raise UsageError(f"{smi} failed: {said}; name the GPUs with {VISIBLE}, or repair the driver")
    return tuple(line.strip() for line in out.decode().splitlines() if line.strip().isdecimal())


def divide(devices: Sequence[str], wants: Sequence[int]) -> list[tuple[str, ...]]:
    """Give each engine as many GPUs as it wants, in order.

    Raises ``UsageError`` where there are too few.
    """
    total = sum(wants)
    if total > len(devices):
        equal = len(set(wants)) == 1
        each = (
            f"{len(wants)} engines need {wants[0]} each" if equal else f"the engines need {'+'.join(map(str, wants))}"
        )
        seen = f" ({', '.join(devices)})" if devices else ""
        raise UsageError(
            f"{each}, {total} GPUs in all, but {len(devices)} can be used{seen}: start fewer engines, lower "
            f"--gpus-per-engine or the parallel sizes, or widen {VISIBLE}"
        )
    found: list[tuple[str, ...]] = []
    start = 0
    for want in wants:
        found.append(tuple(devices[start : start + want]))
        start += want
    return found
