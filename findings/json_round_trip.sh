#!/usr/bin/env bash
# datasets 5.2.0: the type Json does not give back what it was given.
#
# Expected: a cell of a Json column comes back as it was: a text as that text, a float with its digits.
# Seen: the texts "5" and "null" come back as the number 5 and None, 1/3 loses digits, and whole numbers
#   of more than 64 bits come back as text. `load_dataset("json")` makes such a column by itself where
#   cells differ (see json_type.sh), and changes the texts in the file in the same way.
# Why it matters: next to one number or list, the gold answer "5" is an int, and an exact match with the
#   text of a completion fails.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pyarrow==26.0.1
cat > probe.py <<'PY'
import datasets

features = datasets.Features({"cell": datasets.Json()})
for cell in ("five", "5", "null", 5, 1 / 3, [1 / 3], {"answer": "5"}, 2**64):
    try:
        rows = datasets.Dataset.from_dict({"cell": [cell]}, features=features)
        print(f"{cell!r} -> {rows[0]['cell']!r}")
    except Exception as error:
        print(f"{cell!r} -> {type(error).__name__}")
PY
cat >> probe.py <<'PY'

with open("rows.jsonl", "w") as file:
    file.write('{"cell": "5"}\n{"cell": 7}\n')
datasets.disable_progress_bars()
data = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print("from a file:", data["cell"][:])
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
'five' -> 'five'
'5' -> 5
'null' -> None
5 -> 5
0.3333333333333333 -> 0.33333333330000003
[0.3333333333333333] -> [0.33333333330000003]
{'answer': '5'} -> {'answer': '5'}
18446744073709551616 -> '18446744073709551616'
from a file: [5, 7]
SEEN
