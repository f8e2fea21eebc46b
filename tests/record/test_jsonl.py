"""Claim: whatever text a model or a user gives is written, and read again as it was.

About `common.record.jsonl`.
"""

import json

import pytest

from common.record.jsonl import json_line, read_jsonl, write_atomically

HALVES = ["\ud83d", "a \udc00 b", "\ud83d\ud83d", "\\ud83d \ud83d", "\U0001f600\udfff"]


@pytest.mark.parametrize("text", [*HALVES, "\u2028\x00", "\U0001f600", "\\"])
def test_any_text_is_written_and_read_again(tmp_path, text):
    record = {"prompt": text, "columns": [{"key": text}, None], text: 1.0}
    write_atomically(tmp_path / "rows.jsonl", [json_line(record)] * 2)
    assert read_jsonl(tmp_path / "rows.jsonl") == [record] * 2
    assert json.loads((tmp_path / "rows.jsonl").read_bytes().splitlines()[0]) == record
