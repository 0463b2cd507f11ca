"""``fleetgate doctor``: tries a list of engines and says what would go wrong, before a training run finds out."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.text import Text

from proxy.config import Settings
from proxy.core.addresses import parse_engine_url
from proxy.examine import Examined, Examiner, Finding, Grade
from proxy.sources import ConfigError, load
from proxy.status import plain


def compare(engines: Sequence[Examined]) -> list[Finding]:
    """What only shows when engines are laid side by side."""
    found: list[Finding] = []
    living = [engine for engine in engines if engine.findings[0].grade is Grade.OK]
    for name, values, fix in (
        (
            "same-weights",
            [engine.version for engine in living if engine.version is not None],
            "the label that most hold becomes the fleet's and the others are fenced until a sync; a tie fences all",
        ),
        (
            "same-models",
            [", ".join(engine.models) for engine in living if engine.models],
            "the proxy sends any request to any engine: serve one model under one name (--served-model-name)",
        ),
        ("same-vllm", [engine.server for engine in living if engine.server is not None], "use one version everywhere"),
    ):
        counts = Counter(values)
        if len(counts) > 1:
            told = "; ".join(f"{value!r} on {count}" for value, count in counts.most_common())
            found.append(Finding(name, Grade.WARN, told, fix))
        elif counts:
            found.append(Finding(name, Grade.OK, f"{next(iter(counts))!r} on all"))
    if not living:
        found.append(Finding("living", Grade.FAIL, "no engine answers", "the proxy would start and hold every request"))
    return found


async def examine_all(urls: Sequence[str], settings: Settings) -> list[Examined]:
    """Every engine at once."""
    return list(await asyncio.gather(*(Examiner(url, settings).examine() for url in urls)))


_STYLES = {Grade.OK: ("green", "ok  "), Grade.WARN: ("yellow", "warn"), Grade.FAIL: ("red", "FAIL")}


def render(title: str, findings: Iterable[Finding]) -> Text:
    """Findings under a title, a line each, with what to do below."""
    text = Text(f"{plain(title)}\n", style="")
    for finding in findings:
        style, mark = _STYLES[finding.grade]
        text.append(f"  {mark}", style=style)
        text.append(f"  {finding.check:<13}{plain(finding.text)}\n")
        if finding.fix and finding.grade is not Grade.OK:
            text.append(f"        -> {finding.fix}\n", style="dim")
    return text


def _urls(settings: Settings) -> list[str]:
    urls = [*settings.engine]
    if settings.engines_file is not None:
        lines = settings.engines_file.read_text(encoding="utf-8").splitlines()
        urls += [parse_engine_url(line.strip()) for line in lines if line.strip() and not line.strip().startswith("#")]
    return list(dict.fromkeys(urls))


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("--engine", multiple=True, help="Base URL of an engine; the same as an argument.")
@click.option("--engine-api-key", help="The engines' API key.  [env: FLEETGATE_ENGINE_API_KEY]")
@click.option("--engine-ca", metavar="FILE", help="PEM file with the CA that signs the engines' certificates.")
@click.option("--config", type=click.Path(path_type=Path), help="YAML file of the proxy; its engines are tried.")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
def doctor(
    urls: tuple[str, ...],
    engine: tuple[str, ...],
    engine_api_key: str | None,
    engine_ca: str | None,
    config: Path | None,
    *,
    as_json: bool,
) -> None:
    """Try engines and say what would go wrong. Changes nothing on them. Takes some 7 seconds.

    Example: fleetgate doctor http://127.0.0.1:8001 http://127.0.0.1:8002

    Without URLs it tries the engines of the environment and the config file. Ends with 1 if something must be fixed.
    """
    flags: dict[str, Any] = {"engine": [*urls, *engine], "engine_api_key": engine_api_key, "engine_ca": engine_ca}
    try:
        settings = load({key: value for key, value in flags.items() if value}, config)
        found = _urls(settings)
    except (ConfigError, OSError, ValueError) as error:
        click.echo(f"fleetgate: {error}", err=True)
        sys.exit(2)
    if not found:
        click.echo("fleetgate: which engines? fleetgate doctor http://127.0.0.1:8001 ...", err=True)
        sys.exit(2)
    engines = asyncio.run(examine_all(found, settings))
    together = compare(engines)
    if as_json:
        data = {"engines": {each.url: each.findings for each in engines}, "fleet": together}
        click.echo(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console(highlight=False)
        for each in engines:
            console.print(render(each.url, each.findings), soft_wrap=True)
        console.print(render("all together", together), soft_wrap=True)
    everything = [*together, *(finding for each in engines for finding in each.findings)]
    if any(finding.grade is Grade.FAIL for finding in everything):
        sys.exit(1)
