"""The tables of docs/ladder.md are what the planner says; only measured values are filled in."""

from pathlib import Path

from experiments.bench import ladder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ladder.md"


def rows(text: str) -> list[list[str]]:
    """Tables without the column that is filled in by hand."""
    lines = [line for line in text.splitlines() if line.startswith(("## ", "| "))]
    return [[cell.strip(" -:") for cell in line.split("|")[:-2] or [line]] for line in lines]


def test_the_page_is_what_the_planner_says():
    told = PAGE.read_text()
    # `python -m experiments.bench.ladder --into docs/ladder.md` writes them anew.
    assert rows(ladder.page(list(ladder.STAGES), ladder.ON_PAGE, ladder.RANKS)) == rows(told)
    assert all(f"--{name}" in told for name in ladder.COMMON)
