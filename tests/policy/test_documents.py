"""Links between our documents lead somewhere, and what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "tests/*.md", "recipes/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    broken = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(document.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (document.parent / name).resolve() if name else document
        if not place.exists() or (anchor and anchor not in anchors(place.read_text("utf-8"))):
            broken.append(target)

    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_source_files_that_a_document_names_exist(document: Path) -> None:
    folders = "common|buffer|controller|producers|consumers|deploy|tests|docs|recipes|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", document.read_text("utf-8"))

    missing = [name for name in named if not (ROOT / name).exists() and not (document.parent / name).exists()]

    assert not missing


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE", "tests/README.md"])
def test_the_document_is_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 500


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(r"`(?:[A-Z_]+=\S+ )?make ([a-z]+)", document.read_text("utf-8"))
    }

    assert named <= targets


def test_the_recipe_reference_is_current() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rlmq.common.recipe.reference"], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (ROOT / "docs" / "recipe.md").read_text("utf-8"), "Run: make docs"


def test_keys_that_the_page_for_newcomers_names_exist() -> None:
    from rlmq.common.recipe.convert import all_keys

    known = {re.sub(r"\.\d+\.", ".0.", key) for key in all_keys()}
    page = (ROOT / "docs" / "migrate.md").read_text("utf-8")
    rows = re.findall(r"^\| .+? \| (`.+?`) \| .*\|$", page, re.MULTILINE)
    named = {key for row in rows for key in re.findall(r"`([a-z_.0-9]+)`", row)} - {"rlmq"}

    assert len(named) > 40
    assert named <= known, f"no keys: {sorted(named - known)}"


def test_the_readme_prints_the_script_that_is_there() -> None:
    script = (ROOT / "docs" / "tutorials" / "ppo.py").read_text("utf-8")
    printed = re.search(r"^```python\n(import rlmq\n.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)

    without_docstrings = re.sub(r'^ *""".*?"""\n+', "", script, flags=re.M | re.S)
    assert printed is not None
    assert printed.group(1).split() == without_docstrings.split()
