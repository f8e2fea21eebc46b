"""The tables of README and `docs/` that show records, and the lines to which records point.

    python -m experiments.evidence.tables

A page has the place of a table between `<!-- NAME -->` and `<!-- /NAME -->`; NAME is one of
`TABLES`, a part of `make.py` or a part, a dot and what is shown of it. Where a record is not there
stands the command that makes it.
"""

import re
from collections.abc import Callable
from functools import partial

from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.evidence.exercises import questions
from experiments.evidence.make import (
    PARTS,
    RECORDS,
    ROOT,
    cells,
    printed,
    read,
    read_record,
    what_changed,
)
from experiments.evidence.records import ablations, chains, film, papers, reward_curve, speed
from experiments.explain.page import find_lines_again
from experiments.runs.overoptimization.page import fallen
from experiments.runs.overoptimization.plots import draw_curves

PLACE = re.compile(r"(?s)(<!-- ([a-z0-9_.-]+) -->\n)(.*?)(<!-- /\2 -->)")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def write() -> None:
    """Put the tables of what is recorded into the pages, and draw the pictures."""
    for explained in RECORDS.glob("explain-*/*.html"):
        find_lines_again(explained)
    for page in PAGES:
        page.write_text(filled(page.read_text(), is_in_docs=page.parent != ROOT))
    for part in filter(read_record, chains.DRAWN):
        chains.draw(part)
    for part in filter(read_record, speed.MODELS):
        speed.draw(part)
    if any(map(read_record, film.SEEDS)):
        film.draw()
    if read_record(reward_curve.PART):
        reward_curve.draw()
    if read_record("ablations"):
        ablations.draw()
    if read_record("overoptimization"):
        results = read("overoptimization/results.json")
        draw_curves(results, ROOT / "assets" / "overoptimization.png", num_columns=1, width=5)


def filled(text: str, *, is_in_docs: bool = True) -> str:
    """A page with its tables as the records have them; in `docs/` the first one of a part names it.

    Raises:
        KeyError: a place has the name of no table.
    """
    named = {"records", "questions"} if is_in_docs else {"records", *PARTS}

    def table(place: re.Match[str]) -> str:
        begin, name, _, end = place.groups()
        part, content = name.partition(".")[0], TABLES[name]
        if part in PARTS and not read_record(part):
            return f"{begin}*Not recorded: `make results PARTS={part}`.*\n{end}"
        told = "" if part in named else f"\n\n*[Record](../assets/results/{part}): {source(part)}.*"
        named.add(part)
        return f"{begin}{content()}{told}\n{end}"

    return PLACE.sub(table, text)


def source(part: str) -> str:
    """What made a record; `record.json` has the versions of packages too."""
    record = read_record(part)
    gpu = f", {record['gpu']}" if record.get("gpu") else ""
    changed = f"; since then {what} have changed" if (what := what_changed(part)) else ""
    return (
        f"`make results PARTS={part}`, {record['minutes']:.0f} minutes, {record['date']}, commit "
        f"{record['git_commit'][:10]}, {record['cpu']}, {record['cores']} cores{gpu}{changed}"
    )


def columns(part: str) -> dict[str, list[str]]:
    """The table that a command printed, by the heads of its columns."""
    heads, *rows = cells(printed(f"{part}/printed.md"))
    return dict(zip(heads, map(list, zip(*rows, strict=True)), strict=True))


def records() -> str:
    """Every part: how long its record took, and on which machine and commit."""
    rows = []
    for name in PARTS:
        record = read_record(name)
        known = [str(record.get(key, NOT_MEASURED)) for key in ("minutes", "date", "cpu")]
        known[-1] = record.get("gpu") or known[-1]
        rows.append([name, *known, record.get("git_commit", NOT_MEASURED)[:10]])
    return markdown.table(["part", "minutes", "date", "processor", "commit"], rows)


# ---- sweeps --------------------------------------------------------------------------------------


def turns() -> str:
    """The picture, and the number of seeds of each method on which gold reward fell."""
    picture = "![Gain in gold and proxy reward over the distance](../assets/overoptimization.png)"
    return f"{picture}\n\n{fallen(read('overoptimization/results.json'))}"


# ---- speed and memory ----------------------------------------------------------------------------


def plans() -> str:
    """How near the plans of memory are to what runs took."""
    ratios = sorted(map(float, columns("plans")["planned / in use"]))
    return (
        f"Of {len(ratios)} real runs on a CPU plans are {ratios[0]:.2f} to {ratios[-1]:.2f} of the "
        "memory in use."
    )


def variants() -> str:
    """How alike runs on one process and on several are."""
    found = columns("variants")
    drawn = [cell for cell in found["other completions"] if cell[0] not in "0-"]
    return (
        f"Of {len(found['variant'])} variants the largest relative difference of a loss is "
        f"{max(map(float, found['loss'])):.1e}; {len(drawn)} drew another completion; "
        f"{sum(map(int, found['warnings']))} warnings."
    )


def kills() -> str:
    """Totals of the fault drill: the last line that it printed."""
    return printed("kills/printed.md").splitlines()[-1]


TABLES: dict[str, Callable[[], str]] = {
    "records": records,
    **chains.TABLES,
    "ablations": partial(ablations.primary_table, "ablations"),
    "ablations.short": ablations.what_matters,
    "ablations.papers": papers.table,
    "iterative": partial(ablations.primary_table, "iterative", "grpo"),
    "overoptimization": turns,
    **film.TABLES,
    "bench-tiny.short": speed.table,
    "bench-quality.short": speed.quality,
    "one-sentence": reward_curve.shown,
    "one-sentence.differences": reward_curve.differences,
    "bench-tiny": partial(speed.against_trl, "bench-tiny"),
    "bench-gpt2-small": partial(speed.against_trl, "bench-gpt2-small"),
    "bench-quality": partial(printed, "bench-quality/table.md"),
    "conformance": partial(printed, "conformance/printed.md"),
    "questions": questions,
    "exercises": partial(printed, "exercises/printed.md"),
    "plans": plans,
    "variants": variants,
    "kills": kills,
}


if __name__ == "__main__":
    write()
