"""GSM8K's questions and solutions as rows for the recipes beside.

    python assets/recipes/gsm8k/make_rows.py
    python assets/recipes/gsm8k/make_rows.py --source FOLDER

reads the data of Cobbe et al. 2021 (arXiv 2110.14168) from the hub, or `train` and `test` (.jsonl,
.jsonl.gz, .parquet) with the columns `question` and `answer` in a folder, as a clone of
github.com/openai/grade-school-math has it, and writes `prompt` (messages), `completion` (a message,
for SFT) and `answer` (for the reward function `gsm8k`) to `data/gsm8k`.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where `common` is
from experiments.runs import row_maker  # noqa: E402

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


def main(source: str = "openai/gsm8k", target: str = "data/gsm8k") -> None:
    """Read both splits, then write both."""
    from datasets import load_dataset

    config = None if Path(source).is_dir() else "main"
    splits = {name: load_dataset(source, config, split=name) for name in ("train", "test")}
    Path(target).mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        with open(Path(target) / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(make_row(row["question"], row["answer"])) + "\n")


if __name__ == "__main__":
    row_maker.run(main, __doc__)
