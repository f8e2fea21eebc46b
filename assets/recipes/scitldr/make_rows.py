"""SciTLDR's abstracts and SummEval's pairs as rows for the recipes beside.

    git clone https://github.com/allenai/scitldr
    python assets/recipes/scitldr/make_rows.py --source scitldr/SciTLDR-Data/SciTLDR-A

reads Cachola et al. 2020 (arXiv 2004.15011) from that folder, and the ratings of Fabbri et al. 2021
(arXiv 2007.12626) from the hub or a folder (`--pairs_source`); writes `data/scitldr` (prompt,
completion: the author's own summary) and `data/summeval_preference` (prompt, chosen, rejected,
margin). A pair is two of an article's 16 summaries whose ratings differ by half a point or more, a
rating being the mean of four dimensions by three experts. The last fifth of the articles is held
out.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where `common` is
from experiments.runs import row_maker  # noqa: E402

SPLITS = {"train": "train.jsonl", "dev": "validation.jsonl"}
DIMENSIONS = ("coherence", "consistency", "fluency", "relevance")
SMALLEST_MARGIN = 0.5  # points of 1 to 5


def abstracts(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of SciTLDR, each with the file it belongs to."""
    for name, target in SPLITS.items():
        for line in (source / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            paper = json.loads(line)
            prompt = f"TITLE: {paper['title']}\n\nPOST: {' '.join(paper['source'])}\n\nTL;DR:"
            yield target, {"prompt": prompt, "completion": f" {paper['target'][0]}"}


def pairs(articles: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pairs of SummEval, each with the file it belongs to."""
    for number, article in enumerate(articles):
        target = "train.jsonl" if 5 * number < 4 * len(articles) else "validation.jsonl"
        by_dimension = [article[name] for name in DIMENSIONS]
        ratings = [sum(scores) / len(DIMENSIONS) for scores in zip(*by_dimension, strict=True)]
        rated = sorted(zip(ratings, article["machine_summaries"], strict=True), reverse=True)
        for (high, chosen), (low, rejected) in itertools.combinations(rated, 2):
            if high - low >= SMALLEST_MARGIN - 1e-6:
                row = {"prompt": f"POST: {article['text']}\n\nTL;DR:", "chosen": f" {chosen}"}
                yield target, row | {"rejected": f" {rejected}", "margin": round(high - low, 3)}


def write(folder: Path, rows: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Write the files of a folder, whole or not at all."""
    texts: dict[str, list[str]] = {}
    for name, row in rows:
        texts.setdefault(name, []).append(json.dumps(row) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        (folder / name).write_text("".join(lines), encoding="utf-8")


def main(source: str = "", pairs_source: str = "mteb/summeval", target: str = "data") -> None:
    """Make both data sets."""
    from datasets import load_dataset

    if not source:
        raise OSError("--source is required, SciTLDR-Data/SciTLDR-A of a clone of its repository")
    write(Path(target, "scitldr"), abstracts(Path(source)))
    articles = load_dataset(pairs_source, split="test").to_list()
    write(Path(target, "summeval_preference"), pairs(articles))


if __name__ == "__main__":
    row_maker.run(main, __doc__)
