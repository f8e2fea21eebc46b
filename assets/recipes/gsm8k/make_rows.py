"""GSM8K's questions and solutions as rows for `sft.yaml` and `grpo.yaml`.

    python assets/recipes/gsm8k/make_rows.py train.jsonl.gz data/gsm8k/train.jsonl
    python assets/recipes/gsm8k/make_rows.py test.jsonl.gz data/gsm8k/test.jsonl

reads the data of Cobbe et al. 2021 (arXiv 2110.14168; github.com/openai/grade-school-math), JSON
lines with the columns `question` and `answer`, and writes `prompt` (messages), `completion` (a
message, for SFT) and `answer` (for the reward function `gsm8k`).
"""

import gzip
import json
import re
import sys
from pathlib import Path

INSTRUCTION = (
    "Solve the problem step by step. End with a line that has #### and then the answer, a number "
    "and nothing else."
)


def make_row(question: str, answer: str) -> dict[str, object]:
    """A row; the solution without the calculator's annotations, as in <<3*4=12>>."""
    solution = re.sub(r"<<[^>]*>>", "", answer)
    return {
        "prompt": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": question},
        ],
        "completion": [{"role": "assistant", "content": solution}],
        "answer": answer,
    }


def main(source: str, target: str) -> None:
    """Read one file, write another, and its folder where there is none."""
    open_text = gzip.open if source.endswith(".gz") else open
    with open_text(source, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with open(target, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(make_row(row["question"], row["answer"])) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_rows.py SOURCE.jsonl[.gz] TARGET.jsonl")
    main(*sys.argv[1:])
