"""On the GPU machine: take in one load after another, and put vLLM together once all are there. Standard library only.

``python3 benchmarks/gpu/arrive.py .gpu/load-1`` for each load in any order; ``--finish N`` after the last says how many
there must be, unpacks and installs. Everything lands in ``/tmp/gpu/site``, which goes into ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

BASE: Final = Path("/tmp/gpu")
INBOX: Final = BASE / "inbox"
SITE: Final = BASE / "site"

ENTRY_POINTS: Final = (
    "[vllm.general_plugins]\n"
    "fleetgate_cpu_transfer = engine_launcher.cpu_transfer:register\n"
    "fleetgate_old_nccl = old_nccl:register\n"
)

UNPACK_TRIES: Final = 5
"""tarfile fails where another process makes the same folder at the same time, and all archives have files of vLLM's."""


class Joined:
    """The pieces of an archive, read as one file."""

    def __init__(self, pieces: list[Path]) -> None:
        self._left: Iterator[Path] = iter(pieces)
        self._current = next(self._left).open("rb")

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; empty at the end of the last piece."""
        while not (data := self._current.read(size)):
            following = next(self._left, None)
            if following is None:
                return b""
            self._current.close()
            self._current = following.open("rb")
        return data

    def close(self) -> None:
        """Close the piece that is read."""
        self._current.close()


def take(load: Path) -> None:
    """Keep a load where the next transfer does not replace it."""
    INBOX.mkdir(parents=True, exist_ok=True)
    for each in load.iterdir():
        shutil.copyfile(each, INBOX / each.name)
    print(f"took {load.name}: {len(list(load.iterdir()))} files; {len(list(INBOX.iterdir()))} in all", flush=True)


def unpack(name: str) -> str:
    """One archive into the site; returns what it took."""
    started = time.monotonic()
    pieces = sorted(INBOX.glob(f"{name}*"))
    for tries in range(UNPACK_TRIES):
        with (
            contextlib.closing(Joined(pieces)) as joined,
            lzma.open(joined) as source,  # type: ignore[call-overload]
            tarfile.open(fileobj=source, mode="r|") as tar,
        ):
            try:
                tar.extractall(SITE, filter="data")
                break
            except FileExistsError:
                if tries == UNPACK_TRIES - 1:
                    raise
    return f"unpacked {name} in {time.monotonic() - started:.1f} s"


def finish() -> None:
    """Unpack all at once, each archive on a core of its own."""
    SITE.mkdir(parents=True, exist_ok=True)
    names = sorted({each.name.split(".tar.xz")[0] + ".tar.xz" for each in INBOX.glob("*.tar.xz*")})
    with ProcessPoolExecutor(len(names) or 1) as pool:
        for each in pool.map(unpack, names):
            print(each, flush=True)
    shutil.copyfile(Path(__file__).with_name("old_nccl.py"), SITE / "old_nccl.py")
    info = SITE / "fleetgate-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fleetgate\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def main() -> int:
    """Take loads, then finish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load", type=Path, nargs="*")
    parser.add_argument("--finish", action="store_true")
    args = parser.parse_args()
    for each in args.load:
        take(each)
    if args.finish:
        finish()
        check = (
            "import torch, transformers, vllm, aiohttp, httptools, uvloop, pydantic_settings, tenacity, orjson;"
            "print('torch', torch.__version__, 'gpus', torch.cuda.device_count(), 'vllm', vllm.__version__,"
            "'transformers', transformers.__version__, 'aiohttp', aiohttp.__version__, 'uvloop', uvloop.__version__)"
        )
        return subprocess.run(
            [sys.executable, "-c", check], env={"PYTHONPATH": str(SITE), "PATH": "/usr/bin:/bin"}
        ).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
