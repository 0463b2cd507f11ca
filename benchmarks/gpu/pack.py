"""Pack what a GPU machine without any network lacks: a CUDA vLLM and its wheels, in loads that each fit one transfer.

Run where the registry can be reached: ``python benchmarks/gpu/pack.py --engine-python .engine/bin/python``. Writes
``.gpu/load-1`` ... ``.gpu/load-4``; ``arrive.py`` puts them together on the other side. What is there already is not
made again, so a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

VLLM: Final = "0.33.0"

LIMIT: Final = 57 * 2**20
"""Bytes of one load: 64 MiB travel at a time, and the working tree (about 4 MB) is among them."""

DROPPED: Final = re.compile(
    r"vllm/(vllm-rs$|third_party/(deep_gemm|fmha_sm100)/|vllm_flash_attn/_vllm_fa2_C|_flashkda_C|_flashmla|_qutlass|_deepselect)"
)
"""Parts of vLLM that a dense Llama on Hopper never loads; 570 of 1,020 MB unpacked."""

FILTERS: Final = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**28},
]
"""Slow, once, here: each load less is a minute less of the other machine."""

LARGEST: Final = "vllm/_C_stable_libtorch.abi3.so"
FLASH: Final = "_vllm_fa3_C"

THERE: Final = frozenset(
    [
        "aiofiles",
        "build",
        "contourpy",
        "einops",
        "filelock",
        "fsspec",
        "grpcio",
        "h5py",
        "hf-xet",
        "huggingface-hub",
        "jinja2",
        "joblib",
        "llvmlite",
        "lxml",
        "markupsafe",
        "mpmath",
        "networkx",
        "ninja",
        "numba",
        "numpy",
        "nvidia-ml-py",
        "opencv-python-headless",
        "packaging",
        "pandas",
        "pillow",
        "pip",
        "pluggy",
        "protobuf",
        "pyarrow",
        "regex",
        "safetensors",
        "scikit-learn",
        "scipy",
        "sentencepiece",
        "setuptools",
        "shellingham",
        "six",
        "sympy",
        "tiktoken",
        "tokenizers",
        "tqdm",
        "transformers",
        "typer",
        "wheel",
        "wrapt",
        "zipp",
    ]
)
"""What the GPU machine's image holds. Small things are brought all the same: a list of an image is soon old."""

NOT_NEEDED: Final = re.compile(
    r"torch|triton|nvidia|intel|vllm|fleetgate|fastapi-cl|sentry|rich-toolkit|fastar|rignore"
)
"""Left out though missing there: torch's own set is the image's, and no server here uses FastAPI's cloud tools."""

PLATFORMS: Final = [f"manylinux_2_{each}_x86_64" for each in (28, 27, 24, 26, 31, 34, 35, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def download(pins: list[str], target: Path) -> None:
    """Wheels of CPython 3.12 for ``pins``, without what they depend on."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--dest", str(target)]
    for each in PLATFORMS:
        argv += ["--platform", each]
    subprocess.run([*argv, *pins], check=True)


def wanted(engine_python: Path) -> list[str]:
    """What vLLM's own environment holds and the GPU machine does not."""
    listed = subprocess.run(
        [str(engine_python), "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    )
    found = []
    for each in json.loads(listed.stdout):
        name = re.sub(r"[-_.]+", "-", each["name"]).lower()
        if name not in THERE and not NOT_NEEDED.search(name):
            found.append(f"{each['name']}=={each['version']}")
    return found


def compress(members: list[zipfile.ZipInfo], wheel: zipfile.ZipFile, target: Path) -> None:
    """An ``.tar.xz`` of members of the wheel; an unfinished one never has the final name."""
    part = target.with_suffix(".part")
    with lzma.open(part, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for info in members:
            add(tar, wheel, info, info.filename)
    part.rename(target)


def add(tar: tarfile.TarFile, wheel: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> None:
    """One file of a wheel."""
    entry = tarfile.TarInfo(name)
    entry.size = info.file_size
    entry.mode = 0o755 if name.endswith(".so") else 0o644
    with wheel.open(info) as source:
        tar.addfile(entry, source)


def pack_wheels(wheels: list[Path], target: Path) -> None:
    """All wheels as one archive of what they install; of what pip would add (scripts, compiled bytes) nobody needs."""
    part = target.with_suffix(".part")
    with lzma.open(part, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for each in wheels:
            with zipfile.ZipFile(each) as wheel:
                for info in wheel.infolist():
                    parts = info.filename.split("/")
                    if parts[0].endswith(".data"):
                        parts = parts[2:] if parts[1] in ("purelib", "platlib") else []
                    if parts and not info.is_dir():
                        add(tar, wheel, info, "/".join(parts))
    part.rename(target)


def pack_vllm(wheel_path: Path, work: Path) -> list[Path]:
    """Three archives: the largest library, FlashAttention 3, and the rest."""
    archives = [work / f"{each}.tar.xz" for each in ("library", "flash", "rest")]
    with zipfile.ZipFile(wheel_path) as wheel:
        parts: list[list[zipfile.ZipInfo]] = [[], [], []]
        for info in wheel.infolist():
            if info.is_dir() or DROPPED.match(info.filename):
                continue
            which = 0 if info.filename == LARGEST else 1 if FLASH in info.filename else 2
            parts[which].append(info)
        for archive, members in zip(archives, parts, strict=True):
            if not archive.exists():
                print(f"packing {archive.name}: {sum(each.file_size for each in members) / 1e6:.0f} MB")
                compress(members, wheel, archive)
    return archives


def fill(pieces: list[Path], root: Path) -> list[Path]:
    """Spread the pieces over loads below ``LIMIT``, cutting archives where a load is full."""
    loads: list[Path] = []
    room = 0
    for old in root.glob("load-*"):
        shutil.rmtree(old)
    for piece in pieces:
        data = memoryview(piece.read_bytes())
        index = 0
        while data:
            if not room:
                loads.append(root / f"load-{len(loads) + 1}")
                loads[-1].mkdir(parents=True)
                room = LIMIT
            cut, data = data[:room], data[room:]
            room -= len(cut)
            whole = index == 0 and not data
            (loads[-1] / (piece.name if whole else f"{piece.name}.{index:02d}")).write_bytes(cut)
            index += 1
    return loads


def main() -> int:
    """Pack, and say what each load weighs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", type=Path, default=Path(".engine/bin/python"))
    parser.add_argument("--vllm-wheel", type=Path, help="a wheel that was downloaded already")
    parser.add_argument("--into", type=Path, default=Path(".gpu"))
    args = parser.parse_args()
    work = args.into / "work"
    wheels = work / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pins = wanted(args.engine_python)
    done = work / "pins.json"
    if not done.exists() or json.loads(done.read_text()) != pins:
        for old in wheels.iterdir():
            old.unlink()
        (work / "wheels.tar.xz").unlink(missing_ok=True)
        download(pins, wheels)
        done.write_text(json.dumps(pins))
    vllm_wheel = args.vllm_wheel or next(iter(work.glob(f"vllm-{VLLM}-*.whl")), None)
    if vllm_wheel is None:
        download([f"vllm=={VLLM}"], work)
        vllm_wheel = next(iter(work.glob(f"vllm-{VLLM}-*.whl")))
    bundle = work / "wheels.tar.xz"
    if not bundle.exists():
        pack_wheels(sorted(wheels.iterdir()), bundle)
    loads = fill([*pack_vllm(vllm_wheel, work), bundle], args.into)
    print(f"{len(pins)} wheels")
    for each in loads:
        size = sum(one.stat().st_size for one in each.iterdir())
        print(f"{each}: {size / 2**20:.1f} MiB in {len(list(each.iterdir()))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
