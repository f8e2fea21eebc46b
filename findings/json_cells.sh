#!/usr/bin/env bash
# datasets 5.2.0: `load_dataset("json")` changes cells: texts to dates, large whole numbers to floats.
#
# Expected: a JSON string is a str, and a whole number an int, or the reader raises an error.
# Seen: a column whose texts all look like ISO dates has datetime objects; one text that is no date
#   makes the whole column text again. Whole numbers from 2**63 on become rounded floats.
# Why it matters: gold answers such as "2024-05-01" no longer equal the completions' text, so an
#   exact-match reward is 0 for every completion; a training completion is no text at all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pyarrow==26.0.1
cat > probe.py <<'PY'
import json

import datasets

datasets.disable_progress_bars()
CASES = {
    "dates": ["2024-05-01", "2023-12-31"],
    "dates and a text": ["2024-05-01", "unknown"],
    "times": ["12:30", "01:30:00"],
    "whole numbers": [2**63 + 1, 1],
}
for name, cells in CASES.items():
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps({"answer": cell}) + "\n" for cell in cells)
    rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir=name)
    print(f"{name}: {cells[0]!r} -> {rows[0]['answer']!r}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
dates: '2024-05-01' -> datetime.datetime(2024, 5, 1, 0, 0)
dates and a text: '2024-05-01' -> '2024-05-01'
times: '12:30' -> '12:30'
whole numbers: 9223372036854775809 -> 9.223372036854776e+18
SEEN
