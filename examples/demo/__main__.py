"""``python -m examples.demo``: see the README. Exit codes: 0 shown, 1 an error or a mismatch, 2 bad usage."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from engine_launcher.errors import LauncherError
from examples.demo.report import Result, as_json, show
from examples.demo.run import run
from examples.demo.settings import MODES, DemoFailed, DemoSpec
from examples.demo.stack import say

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells report an interrupt."""


async def _until_signal(spec: DemoSpec) -> Result | None:
    """The result, or ``None`` after a signal. More signals change nothing: the end of the processes has limits."""
    task = asyncio.current_task()
    assert task is not None
    asked = False

    def on_signal() -> None:
        nonlocal asked
        say("ending everything" if not asked else "still ending; it takes some seconds")
        if not asked:
            asked = True
            task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal)
    try:
        return await run(spec)
    except asyncio.CancelledError:
        return None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", help="Simulated engines, or real vLLM.")
@click.option("--engines", type=click.IntRange(1), default=2, help="How many engines.")
@click.option("--in-flight", type=click.IntRange(1), default=32, help="Rollouts in flight.")
@click.option("--syncs", type=click.IntRange(1), default=10, help="Weight syncs in each mode.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="Only this mode; may be repeated.")
@click.option("--model", type=click.Path(path_type=Path), default=Path(".models/tiny"), help="Model of real engines.")
@click.option("--vllm", type=click.Path(path_type=Path), help="Environment that has vLLM; else that of `make engine`.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=Path(".run/demo"), help="Directory of the logs.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(json_file: Path | None, modes: tuple[Any, ...], **fields: Any) -> None:
    """Keep rollouts in flight through one URL, replace the weights behind it, and check who made every token."""
    spec = DemoSpec(**fields, modes=modes or MODES)
    try:
        result = asyncio.run(_until_signal(spec))
    except (DemoFailed, LauncherError) as error:
        say(f"demo: {error}")
        sys.exit(error.exit_code if isinstance(error, LauncherError) else 1)
    if result is None:
        sys.exit(INTERRUPTED)
    show(result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_json(result), indent=1) + "\n")
    sys.exit(1 if result.failures else 0)


if __name__ == "__main__":
    main()
