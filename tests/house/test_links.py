"""What the README and the pages of `docs/` point to is there; the README leads to every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("assets/**/*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its fenced blocks, which must be closed."""
    text = FENCE.sub("", page.read_text())
    assert "```" not in text
    return text


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each relative link and picture."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    local = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / file).resolve() if file else page, end) for file, _, end in local]


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them in a link."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_resolves(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), (target, anchor)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\|$\n?)+", prose(page), re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row).count("|") for row in table.splitlines()]
        assert len(set(rows)) == 1, table


def test_the_readme_leads_to_every_page_and_each_begins_with_its_question() -> None:
    linked = {target for target, _ in links(ROOT / "README.md")}
    pages = set(ROOT.glob("docs/*.md"))
    assert pages
    assert pages <= linked
    for page in pages:
        assert re.fullmatch(r"# .*\?", page.read_text().splitlines()[0]), page


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    """`common/losses.py`, `test_losses.py::test_x`, `assets/recipes/demo/sft.yaml`."""
    text = page.read_text()
    for name in re.findall(r"\b(?:assets|common|docs|tests)/[\w./-]+\.\w+", text):
        assert (ROOT / name).exists(), name
    for file, test in re.findall(r"\b(test_\w+\.py)(?:::(\w+))?", text):
        paths = list((ROOT / "tests").rglob(file))
        assert len(paths) == 1, file
        assert not test or f"def {test}(" in paths[0].read_text(), (file, test)
