"""Pages that are made from the code are what the code says, and links inside the tree lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "generate_reference.py"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", ["settings.md", "errors.md", "endpoints.md", "states.md", "metrics.md"])
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
