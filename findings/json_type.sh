#!/usr/bin/env bash
# datasets 5.2.0: columns with mixed cells have the type Json; every other reader sees JSON text.
#
# Expected: the cells that `dataset[0]` shows are those of its Arrow table and of its parquet file.
# Seen: Arrow and parquet hold JSON text: a text is in quotes, messages are one text each; `sort` and
#   `unique` raise an error. Only Python rows are decoded. One message with a key that the others lack
#   (a tool call) is enough for the whole column of messages.
# Why it matters: a trainer that reads Arrow for speed trains on '"Hi."' with the quotes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pyarrow==26.0.1
cat > probe.py <<'PY'
import json

import datasets
import pyarrow.parquet

datasets.disable_progress_bars()
MESSAGES = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi", "name": "Bo"}]
CASES = {"mixed": ["five", 5], "plain messages": [MESSAGES[0]] * 2, "one more key": MESSAGES}
for name, cells in CASES.items():
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps({"cell": cell}) + "\n" for cell in cells)
    data = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir=name)
    data.to_parquet("rows.parquet")
    parquet = pyarrow.parquet.read_table("rows.parquet").column("cell")[0].as_py()
    arrow = data.with_format("arrow")[0]["cell"][0].as_py()
    print(f"{name}: row {data[0]['cell']!r}, arrow {arrow!r}, parquet {parquet!r}")
    if name == "mixed":
        for method in (data.sort, data.unique):
            try:
                method("cell")
            except Exception as error:
                print(f"  {method.__name__}: {type(error).__name__}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
mixed: row 'five', arrow '"five"', parquet '"five"'
  sort: ArrowTypeError
  unique: ArrowNotImplementedError
plain messages: row [{'role': 'user', 'content': 'Hi'}], arrow [{'role': 'user', 'content': 'Hi'}], parquet [{'role': 'user', 'content': 'Hi'}]
one more key: row [{'role': 'user', 'content': 'Hi'}], arrow ['{"role":"user","content":"Hi"}'], parquet ['{"role":"user","content":"Hi"}']
SEEN
