"""Pages that are made from the code are what the code says, and links inside the tree lead somewhere."""

import re
import runpy
from pathlib import Path

import click
import pytest

from proxy.cli import main

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "generate_reference.py"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", ["settings.md", "errors.md", "endpoints.md", "states.md", "states.svg", "metrics.md"])
def test_the_reference_is_what_the_code_says(name):
    text = (GENERATOR["DOCS"] / name).read_text()
    assert text == GENERATOR["pages"]()[name], "run scripts/generate_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tutorial_shows_the_example_as_it_is():
    assert (ROOT / "examples" / "async_loop.py").read_text() in (ROOT / "docs" / "tutorial.md").read_text()


OTHERS = frozenset({
    # vLLM's
    "--api-key", "--attention-backend", "--dtype", "--enable-lora", "--enable-scale-out", "--enforce-eager",
    "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--logprobs-mode", "--max-logprobs", "--max-model-len",
    "--otlp-traces-endpoint", "--tensor-parallel-size", "--weight-transfer-config",
    # of scripts, benchmarks and kubectl
    "--finish", "--from-literal", "--gpus", "--groups", "--native", "--only", "--out", "--phases", "--repeats",
    "--seconds", "--sim", "--size", "--write",
})  # fmt: skip
"""Flags in the pages that are not of ``fleetgate``."""


def flags():
    """Every flag of every command."""
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    return {flag for command in commands for each in command.params for flag in (*each.opts, *each.secondary_opts)}


def make_targets():
    files = [ROOT / "Makefile", *(ROOT / "scripts").glob("*.mk")]
    return {name for file in files for name in re.findall(r"^([a-z][a-z0-9-]*):", file.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_targets_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    assert named - flags() - OTHERS - {"--help", "--version"} == set()
    assert set(re.findall(r"`make ([a-z][a-z0-9-]+)", text)) - make_targets() == set()
    paths = set(
        re.findall(r"`((?:tests|proxy|benchmarks|scripts|docker|examples|engine_launcher)/[\w/.-]*[\w/])`", text)
    )
    built = {"benchmarks/src/load", "benchmarks/src/mock"}
    assert {path for path in paths - built if not (ROOT / path).exists()} == set()


def test_what_operations_quotes_is_what_the_proxy_says():
    rows = re.findall(r"^\| (.+?) \| .+ \|$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    quotes = {quote for row in rows for quote in re.findall(r'(?<!=)"([^"]+)"', row)}
    assert len(quotes) > 6
    source = "".join(path.read_text() for path in (ROOT / "proxy").rglob("*.py"))
    by_openssl = {"certificate verify failed"}
    assert {quote for quote in quotes - by_openssl if quote not in source} == set()
    named = {name for row in rows for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", row)}
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert {name for name in named if name not in metrics and name not in errors} == set()


def test_each_promise_of_the_readme_names_tests_that_exist():
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 7
    for number, _, shown_by in rows:
        names = re.findall(r"`([\w/.]+)`", shown_by)
        folder = ROOT
        found = 0
        for name in names:
            # A name without its folder lies beside the one before, or under tests/scenarios.
            places = [ROOT / name, folder / name, ROOT / "tests" / "scenarios" / name]
            place = next((place for place in places if place.exists()), None)
            assert place is not None, f"promise {number} names {name}"
            folder = place if place.is_dir() else place.parent
            tests = [place] if place.is_file() else place.rglob("test_*.py")
            found += sum(test.read_text().count("def test_") for test in tests)
        assert found > 2, f"promise {number} is shown by no test"
