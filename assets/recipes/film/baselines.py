"""What simple methods reach on the pairs of the recipe `film`, next to its reward models.

    python -m assets.recipes.film.baselines --source data/vaderSentiment-3.3.2.tar.gz

reads the rows of `make_rows.py` and writes `scores.json` to `--target`: for the test rows of
`proxy` (votes) and of `means` the scores of [chosen, rejected] by

    lexicon        the sum of the ratings of its words (Hutto and Gilbert 2014)
    ridge          ridge regression of the mean rating on TF-IDF of words and pairs of words
    other people   the mean rating, of votes by all other people: no model can do much better
"""

import json
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsqr

from assets.recipes.film.make_rows import CUE, table
from common.record.jsonl import read_jsonl
from experiments.runs import row_maker

LEXICON = "vaderSentiment/vader_lexicon.txt"  # in the package
WORD = re.compile(r"[a-z][a-z'-]*")
FEWEST = 2  # training sentences that a word or a pair of words must be in


def lexicon(package: Path) -> dict[str, float]:
    """The mean rating of each word."""
    with tarfile.open(package) as archive:
        return {cells[0]: float(cells[1]) for cells in table(archive, LEXICON)}


def terms(text: str) -> list[str]:
    """Words and pairs of neighbouring words."""
    words = WORD.findall(text.lower())
    return words + [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]


class Ridge:
    """Ridge regression on TF-IDF, each row of length 1."""

    def __init__(self, texts: list[str], targets: np.ndarray) -> None:
        """Fit it by least squares, the sum of the squared weights added once."""
        counts = Counter(term for text in texts for term in dict.fromkeys(terms(text)))
        self.columns = {t: i for i, t in enumerate(t for t, n in counts.items() if n >= FEWEST)}
        seen = np.array([counts[term] for term in self.columns])
        self.idf = np.log((1 + len(texts)) / (1 + seen)) + 1
        self.mean = targets.mean()
        self.weights = lsqr(self.features(texts), targets - self.mean, damp=1.0)[0]

    def features(self, texts: list[str]) -> csr_array:
        """(N, terms)."""
        found = [Counter(term for term in terms(text) if term in self.columns) for text in texts]
        cells = [
            (row, self.columns[term], n * self.idf[self.columns[term]])
            for row, counts in enumerate(found)
            for term, n in counts.items()
        ]
        rows, columns, values = map(np.array, zip(*cells, strict=True))
        lengths = np.sqrt(np.bincount(rows, values**2, len(texts)))
        weights = values / lengths[rows]
        return csr_array((weights, (rows, columns)), (len(texts), len(self.columns)))

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Predicted mean ratings."""
        return np.asarray(self.mean + self.features(texts) @ self.weights, np.float64)


def main(source: str = "", target: str = "output/film/baselines") -> None:
    """Fit on the training sentences, score the test rows."""
    ratings = lexicon(Path(source))
    train = read_jsonl(Path("data/film/sft/train.jsonl"))
    texts = [(row["prompt"] + row["completion"]).removeprefix(f"{CUE} ") for row in train]
    ridge = Ridge(texts, np.array([row["mean_rating"] for row in train]))
    found: dict[str, Any] = {}
    for name, rows in (("votes", "proxy"), ("means", "means")):
        pairs = read_jsonl(Path("data/film", rows, "test.jsonl"))
        sides = ("chosen", "rejected")
        predicted = np.stack([ridge([pair[side] for pair in pairs]) for side in sides], axis=1)
        words = [[WORD.findall(pair[side].lower()) for side in sides] for pair in pairs]
        found[name] = {
            "lexicon": [[sum(ratings.get(w, 0.0) for w in own) for own in two] for two in words],
            "ridge": predicted.tolist(),
            "other people": [[pair[f"{side}_mean"] for side in sides] for pair in pairs],
        }
    Path(target).mkdir(parents=True, exist_ok=True)
    Path(target, "scores.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    row_maker.run(main, __doc__)
