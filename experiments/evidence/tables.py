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
from experiments.evidence.records.studies import ROOT, Recording

PLACE = re.compile(r"(?s)(<!-- ([a-z0-9_.-]+) -->\n)(.*?)(<!-- /\2 -->)")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def write() -> None:
    """Put the tables of what is recorded into the pages, and draw the pictures."""
    for page in PAGES:
        page.write_text(filled(page.read_text(), is_in_docs=page.parent != ROOT))
    for name, draw in studies.functions("FIGURES").items():
        if studies.read_record(name):
            draw()


def filled(text: str, *, is_in_docs: bool = True) -> str:
    """A page with its tables as the records have them; in `docs/` the first one of a part names it.

    Raises:
        KeyError: a place has the name of no table.
    """
    recordings, tables = studies.recordings(), {"records": records, **studies.functions("TABLES")}
    linked = set() if is_in_docs else {*recordings}

    def table(place: re.Match[str]) -> str:
        begin, name, _, end = place.groups()
        recorded, content = name.partition(".")[0], tables[name]
        if recorded not in recordings:
            return f"{begin}{content()}\n{end}"
        if not studies.read_record(recorded):
            return f"{begin}*Not recorded: `make results PARTS={recorded}`.*\n{end}"
        link = f"\n\n*[Record](../assets/results/{recorded}): {source(recordings[recorded])}.*"
        shown = f"{begin}{content()}{'' if recorded in linked else link}\n{end}"
        linked.add(recorded)
        return shown

    return PLACE.sub(table, text)


def source(recording: Recording) -> str:
    """Command, date, commit and machine of a record; `record.json` has the packages too."""
    record = studies.read_record(recording.name)
    assert record
    gpu = f", {record.gpu}" if record.gpu else ""
    changed = studies.what_changed(recording, record)
    since = f"; since then {changed} have changed" if changed else ""
    return (
        f"`make results PARTS={recording.name}`, {record.minutes:.0f} minutes, {record.date}, "
        f"commit {record.git_commit[:10]}, {record.cpu}, {record.cores} cores{gpu}{since}"
    )


def records() -> str:
    """Every part: how long its record took, and on which machine and commit."""
    rows = []
    for name in studies.recordings():
        cells = [NOT_MEASURED] * 4
        if record := studies.read_record(name):
            processor = record.gpu or record.cpu
            cells = [str(record.minutes), record.date, processor, record.git_commit[:10]]
        rows.append([name, *cells])
    return markdown.table(["part", "minutes", "date", "processor", "commit"], rows)


if __name__ == "__main__":
    write()
