"""Claim: a table of README or `docs/` says what its record says."""

import json
from pathlib import Path

import pytest

from tests.results import make, tables

PAGE = "# Page\n\nBefore.\n\n<!-- demo.mean -->\nold\n<!-- /demo.mean -->\n\nAfter.\n"
OURS = {"system": "sft", "metric": "kl", "unit": "nats", "by_seed": {"0": 1.0, "1": 3.0}}
RECORD = {
    "git_commit": "0123456789abcdef",
    "date": "2026-01-01",
    "minutes": 12.3,
    "cpu": "a processor",
    "cores": 2,
    "packages": {"torch": "2.13.0"},
}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path):
    """After a change of a record: `python -m tests.results.tables`."""
    text = page.read_text()
    assert tables.filled(text) == text
    places = [name for _, name, _, _ in tables.PLACE.findall(text)]
    assert len(places) == text.count("<!-- /")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of one part, in place of those there are."""
    for module in (make, tables):
        monkeypatch.setattr(module, "RECORDS", tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "record.json").write_text(json.dumps(RECORD))
    (tmp_path / "demo" / "replication.json").write_text(json.dumps({"ours": [OURS]}))
    return tmp_path


def test_a_changed_digit_is_found(recorded: Path):
    text = tables.filled(PAGE)
    assert "2.00 \N{PLUS-MINUS SIGN} 1.41" in text
    assert "[-10.71, 14.71]" in text  # 2 +- 12.706 * 1.4142 / sqrt(2)
    assert "12 minutes, 2026-01-01, commit 0123456789ab, a processor, 2 cores" in text
    assert tables.filled(text) == text
    assert tables.filled(text.replace("1.41", "1.42")) == text
    assert text.startswith("# Page\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")


def test_a_table_without_a_record_stays(recorded: Path):
    page = PAGE.replace("demo.mean", "kills")
    assert tables.filled(page) == page
    with pytest.raises(KeyError):
        tables.filled(PAGE.replace("demo.mean", "demo.unknown"))
