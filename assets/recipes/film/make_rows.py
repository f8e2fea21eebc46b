"""Sentences of film reviews, each rated by about 15 people, as rows for the recipe `film`.

    pip download --no-deps --no-binary :all: --dest data vaderSentiment==3.3.2
    python assets/recipes/film/make_rows.py --source data/vaderSentiment-3.3.2.tar.gz

reads the ratings of Hutto and Gilbert 2014 (ICWSM), whole numbers from -4 to 4, of the sentences of
Pang and Lee 2005, and writes to `data/film`:

    sft/      prompt: "Film review:" and the first 2 to 6 words; completion: all that follow
    proxy/    prompt: "Film review:"; chosen, rejected: sentences by the votes of single people
    gold/     the same, from the other half of the training sentences
    means/    pairs of all held-out sentences by their mean rating, each sentence once

A vote is two ratings, of two sentences by one person each, drawn by a seed; ties are left out. A
tenth of the sentences is `validation`, a tenth `test`.
"""

import ast
import io
import json
import random
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where `common` is
from common.noise import derive_seed  # noqa: E402
from experiments.runs import row_maker  # noqa: E402

ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"  # in the package
TEXTS, RATINGS = "movieReviewSnippets_GroundTruth.txt", "movieReviewSnippets_anonDataRatings.txt"
CUE = "Film review:"
FEWEST_WORDS, MOST_WORDS = 2, 6  # of a sentence in its prompt
PAIRS_PER_SENTENCE = 2  # votes that a training sentence takes part in, on average


@dataclass(frozen=True)
class Sentence:
    """A sentence with its ratings."""

    text: str
    ratings: list[int]

    @property
    def mean(self) -> float:
        """Mean rating."""
        return sum(self.ratings) / len(self.ratings)

    def mean_without(self, rating: int) -> float:
        """Mean of the other ratings."""
        return (sum(self.ratings) - rating) / (len(self.ratings) - 1)


def read(archive: Path) -> list[Sentence]:
    """The sentences of the package, white space made plain, each text once."""
    with tarfile.open(archive) as package:
        inner = next(m for m in package.getmembers() if m.name.endswith(ARCHIVE))
        stream = package.extractfile(inner)
        assert stream is not None
        with tarfile.open(fileobj=io.BytesIO(stream.read())) as folder:
            lines = {name: list(table(folder, name)) for name in (TEXTS, RATINGS)}
    ratings = {cells[0]: ast.literal_eval(cells[3]) for cells in lines[RATINGS]}
    texts = {" ".join(cells[2].split()): cells[0] for cells in reversed(lines[TEXTS])}
    return [Sentence(text, ratings[number]) for text, number in reversed(texts.items())]


def table(folder: tarfile.TarFile, name: str) -> Iterator[list[str]]:
    """The cells of each line of a file, separated by tabs."""
    member = next(m for m in folder.getmembers() if m.name.endswith(name))
    stream = folder.extractfile(member)
    assert stream is not None
    for line in stream.read().decode("utf-8").splitlines():
        yield line.split("\t")


def part_of(text: str) -> str:
    """The part of a sentence, drawn by a hash: test, validation, or a half of the training part.

    The file begins with the sentences of positive reviews, so its order makes no halves.
    """
    twentieth = derive_seed(0, "film", text) % 20
    parts = {0: "test", 1: "test", 2: "validation", 3: "validation"}
    return parts.get(twentieth, "gold" if twentieth % 2 else "proxy")


def continuation(sentence: Sentence) -> dict[str, object] | None:
    """A row of SFT; None of a sentence that is too short."""
    words = sentence.text.split()
    number = random.Random(sentence.text).randint(FEWEST_WORDS, MOST_WORDS)
    if len(words) <= number:
        return None
    prompt, completion = f"{CUE} {' '.join(words[:number])}", f" {' '.join(words[number:])}"
    return {"prompt": prompt, "completion": completion, "mean_rating": round(sentence.mean, 4)}


def votes(sentences: list[Sentence], number: int, seed: str) -> list[dict[str, object]]:
    """Pairs of two sentences, the one that was rated higher first; means are of all others."""
    draw, rows = random.Random(seed), list[dict[str, object]]()
    while len(rows) < number:
        rated = [(draw.choice(one.ratings), one) for one in draw.sample(sentences, 2)]
        (high, chosen), (low, rejected) = sorted(rated, key=lambda vote: -vote[0])
        if high > low:
            means = chosen.mean_without(high), rejected.mean_without(low)
            rows.append(pair(chosen, rejected, means, high - low))
    return rows


def matched(sentences: list[Sentence]) -> list[dict[str, object]]:
    """Pairs by mean rating: a random matching of the sentences, without pairs of equal means."""
    order = random.Random("matching").sample(sentences, len(sentences))
    pairs = [sorted(two, key=lambda one: -one.mean) for two in zip(order[::2], order[1::2])]  # noqa: B905
    return [pair(a, b, (a.mean, b.mean), a.mean - b.mean) for a, b in pairs if a.mean > b.mean]


def pair(
    chosen: Sentence, rejected: Sentence, means: tuple[float, float], margin: float
) -> dict[str, object]:
    """A row of two sentences with their mean ratings."""
    texts = {"prompt": CUE, "chosen": f" {chosen.text}", "rejected": f" {rejected.text}"}
    columns = {"chosen_mean": means[0], "rejected_mean": means[1], "margin": margin}
    return texts | {name: round(value, 4) for name, value in columns.items()}


def write(path: Path, rows: Iterable[dict[str, object] | None]) -> None:
    """Write a file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows if row]
    path.write_text("".join(lines), encoding="utf-8")


def main(source: str = "", target: str = "data/film") -> None:
    """Write all files."""
    if not source:
        raise OSError("--source is required, vaderSentiment-3.3.2.tar.gz of PyPI")
    parts: dict[str, list[Sentence]] = {"test": [], "validation": [], "proxy": [], "gold": []}
    for sentence in read(Path(source)):
        parts[part_of(sentence.text)].append(sentence)
    folder, training = Path(target), [*parts["proxy"], *parts["gold"]]
    write(folder / "sft" / "train.jsonl", map(continuation, training))
    for name in ("validation", "test"):
        sentences = parts[name]
        write(folder / "sft" / f"{name}.jsonl", map(continuation, sentences))
        write(folder / "proxy" / f"{name}.jsonl", votes(sentences, len(sentences), name))
        write(folder / "means" / f"{name}.jsonl", matched(sentences))
    for name in ("proxy", "gold"):
        number = PAIRS_PER_SENTENCE * len(parts[name])
        write(folder / name / "train.jsonl", votes(parts[name], number, name))


if __name__ == "__main__":
    row_maker.run(main, __doc__)
