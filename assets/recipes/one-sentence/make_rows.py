"""The beginnings of SciTLDR's abstracts as prompts that ask for one short sentence.

    python assets/recipes/one-sentence/make_rows.py

reads `data/scitldr`, which `assets/recipes/scitldr/make_rows.py` makes (`--source` names another
folder of such files), and writes to `data/one-sentence` rows with `prompt` (a message), `text`
(for the reward: the title, and the first sentences up to 45 words) and `completion` (a message: the
author's own summary).
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where `common` is
from experiments.runs import row_maker  # noqa: E402

INSTRUCTION = "Summarize this paper in one short sentence of 8 to 16 words:"
MOST_WORDS = 45  # of the sentences behind the first
ROW = re.compile(r"TITLE: (.*?)\n\nPOST: (.*)\n\nTL;DR:", re.DOTALL)


def make_row(prompt: str, completion: str) -> dict[str, object]:
    """A row of a row of the recipe `scitldr`.

    Raises:
        ValueError: it is not of that form.
    """
    found = ROW.fullmatch(prompt)
    if found is None:
        raise ValueError(f"a prompt is not 'TITLE: ... POST: ... TL;DR:': {prompt[:60]!r}")
    title, abstract = found.groups()
    first, *others = re.split(r"(?<=[.!?])\s+", abstract)
    for sentence in others:
        if len(f"{first} {sentence}".split()) > MOST_WORDS:
            break
        first = f"{first} {sentence}"
    text = f"{title}\n\n{first}"
    return {
        "prompt": [
            {"role": "system", "content": "You write summaries."},
            {"role": "user", "content": f"{INSTRUCTION}\n\n{text}"},
        ],
        "completion": [{"role": "assistant", "content": completion.strip()}],
        "text": text,
    }


def main(source: str = "data/scitldr", target: str = "data/one-sentence") -> None:
    """Write both splits."""
    from datasets import load_dataset

    Path(target).mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        rows = load_dataset(source, split=name)
        with open(Path(target) / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(make_row(row["prompt"], row["completion"])) + "\n")


if __name__ == "__main__":
    row_maker.run(main, __doc__)
