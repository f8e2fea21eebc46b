"""IMDb reviews as prompts and their continuations, for controlled sentiment generation.

    python assets/recipes/sentiment/make_rows.py
    python assets/recipes/sentiment/make_rows.py --source aclImdb --tokenizer FOLDER_OR_HUB_ID

reads the reviews of Maas et al. 2011 from the hub, or from the folder of the original archive
(https://ai.stanford.edu/~amaas/data/sentiment), and writes to `data/imdb` `train.jsonl` (all
25,000) and `validation.jsonl` (1,024 of the test split). A prompt is the first 2 to 8 tokens of a
review (of gpt2-large, by default), as in Rafailov et al. 2023, C.1; the completion is the rest.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where `common` is
from experiments.runs import row_maker  # noqa: E402

SHORTEST, LONGEST = 2, 8  # tokens of a prompt
NUM_HELD_OUT = 1024


def reviews(source: str, split: str) -> list[str]:
    """The texts of a split, in an order that mixes positive and negative ones."""
    folder = Path(source)
    if folder.is_dir():
        files = sorted(folder.glob(f"{split}/pos/*.txt")) + sorted(
            folder.glob(f"{split}/neg/*.txt")
        )
        texts = [file.read_text(encoding="utf-8") for file in files]
        if not texts:
            raise OSError(f"{source} has no {split}/pos/*.txt; it is no folder of the archive")
    else:
        from datasets import load_dataset

        texts = list(load_dataset(source, split=split)["text"])
    random.Random(0).shuffle(texts)
    return [" ".join(text.replace("<br />", " ").split()) for text in texts]


def rows(texts: list[str], tokenizer: Any) -> Iterator[dict[str, str]]:
    """A row for each review that is longer than its prompt."""
    for index, text in enumerate(texts):
        length = random.Random(index).randint(SHORTEST, LONGEST)
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) > length:
            end = offsets[length - 1][1]
            yield {"prompt": text[:end], "completion": text[end:]}


def main(
    source: str = "stanfordnlp/imdb", target: str = "data/imdb", tokenizer: str = "gpt2-large"
) -> None:
    """Write both splits."""
    its_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    splits = {"train": reviews(source, "train"), "validation": reviews(source, "test")}
    Path(target).mkdir(parents=True, exist_ok=True)
    for name, texts in splits.items():
        texts = texts[: NUM_HELD_OUT if name == "validation" else None]
        with open(Path(target) / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for row in rows(texts, its_tokenizer):
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    row_maker.run(main, __doc__)
