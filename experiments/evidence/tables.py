"""The tables of README and `docs/` that show records, and the pictures of records.

    python -m experiments.evidence.tables

A page has the place of a table between `<!-- NAME -->` and `<!-- /NAME -->`; NAME is `records` or
one of `TABLES` in a study's `tables.py`: a part, or a part, a dot and what is shown of it. Where a
record is not there stands the command that makes it.
"""

import re

from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.evidence.records import studies
from experiments.evidence.records.studies import ROOT, Part

PLACE = re.compile(r"(?s)(<!-- ([a-z0-9_.-]+) -->\n)(.*?)(<!-- /\2 -->)")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def write() -> None:
    """Put the tables of what is recorded into the pages, and draw the pictures."""
    for page in PAGES:
        page.write_text(filled(page.read_text(), is_in_docs=page.parent != ROOT))
    for part, draw in studies.figures().items():
        if studies.read_record(part):
            draw()


def filled(text: str, *, is_in_docs: bool = True) -> str:
    """A page with its tables as the records have them; in `docs/` the first one of a part names it.

    Raises:
        KeyError: a place has the name of no table.
    """
    parts, tables = studies.parts(), {"records": records, **studies.tables()}
    linked = set() if is_in_docs else {*parts}

    def table(place: re.Match[str]) -> str:
        begin, name, _, end = place.groups()
        part, content = name.partition(".")[0], tables[name]
        if part not in parts:
            return f"{begin}{content()}\n{end}"
        if not studies.read_record(part):
            return f"{begin}*Not recorded: `make results PARTS={part}`.*\n{end}"
        link = f"\n\n*[Record](../assets/results/{part}): {source(parts[part])}.*"
        shown = f"{begin}{content()}{'' if part in linked else link}\n{end}"
        linked.add(part)
        return shown

    return PLACE.sub(table, text)


def source(part: Part) -> str:
    """What made a record; `record.json` has the versions of packages too."""
    record = studies.read_record(part.name)
    assert record
    gpu = f", {record.gpu}" if record.gpu else ""
    changed = studies.what_changed(part, record)
    since = f"; since then {changed} have changed" if changed else ""
    return (
        f"`make results PARTS={part.name}`, {record.minutes:.0f} minutes, {record.date}, commit "
        f"{record.git_commit[:10]}, {record.cpu}, {record.cores} cores{gpu}{since}"
    )


def records() -> str:
    """Every part: how long its record took, and on which machine and commit."""
    rows = []
    for name in studies.parts():
        cells = [NOT_MEASURED] * 4
        if record := studies.read_record(name):
            processor = record.gpu or record.cpu
            cells = [str(record.minutes), record.date, processor, record.git_commit[:10]]
        rows.append([name, *cells])
    return markdown.table(["part", "minutes", "date", "processor", "commit"], rows)


if __name__ == "__main__":
    write()
