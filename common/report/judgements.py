"""Verdicts from outside: export completions for people or models to compare, import the winners.

    python -m common.report.judgements --output_dir output/eval --systems dpo sft --num_prompts 100
    python -m common.report.judgements --output_dir output/eval --verdicts v.jsonl --judge anna

The first command reads `completions.jsonl` of an evaluation and writes, beside it,
`comparisons.jsonl`: in random order one line per comparison with `id`, `prompt`, `first` and
`second`, two completions in random order without a name; and `comparisons_key.jsonl`, which says
what stands behind an id and is not for the judge. The second reads a line `{"id": ..., "winner":
"first" | "second" | "tie"}` for each id, adds the verdicts to `completions.jsonl`, computes the win
rates of `results.json` and the report anew and prints them. Importing a judge again replaces its
verdicts.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from common.config import flag
from common.errors import UserError, check_fields
from common.evaluation import completions
from common.evaluation.completions import REFERENCE, Answers, Verdict, system_names
from common.evaluation.judges import is_swapped, text_of
from common.evaluation.win_rates import all_win_rates, reward_judges
from common.flags.parser import parse
from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.record.terminal import run_command
from common.report import chain
from common.report.tables import win_rate_table

COMPARISONS, KEY = "comparisons.jsonl", "comparisons_key.jsonl"
WINNERS = {"first": 1.0, "second": 0.0, "tie": 0.5}


@dataclass
class JudgementsConfig:
    """With `verdicts` an import, else an export."""

    output_dir: str = flag("", "folder of an evaluation, with its completions.jsonl", required=True)
    systems: list[str] = flag(
        [], f"names to export every two of, '{REFERENCE}' among them (empty: all)"
    )
    num_prompts: int = flag(0, "export the first prompts only (0: all)")
    seed: int = flag(0, "of the order of comparisons and of the two completions in each")
    verdicts: str = flag("", "file with a line of `id` and `winner` for each comparison")
    judge: str = flag("", "what tables call whoever gave the verdicts")

    def __post_init__(self) -> None:
        """Refuse values that no export or import may have."""
        check_fields(self)
        if bool(self.verdicts) != bool(self.judge):
            raise UserError(
                f"--verdicts is {self.verdicts!r} and --judge is {self.judge!r}; give both to "
                "import verdicts, or neither to export comparisons."
            )


def main(config: JudgementsConfig) -> None:
    """Export, or import and print the win rates."""
    output_dir = Path(config.output_dir)
    answers = completions.read(output_dir)
    if not answers:
        raise UserError(f"{output_dir / completions.FILE} is not there, or empty: run evaluate.py.")
    if not config.verdicts:
        print(f"{export(answers, config)} comparisons: {output_dir / COMPARISONS}")
        return
    answers = with_outside_verdicts(answers, config)
    rates = all_win_rates(answers)
    file = output_dir / "results.json"
    if not file.is_file():
        raise UserError(f"{file} is not there: run evaluate.py.")
    results = json.loads(file.read_text(encoding="utf-8")) | {"win_rates": rates}
    completions.write(answers, output_dir)
    write_atomically(file, [json.dumps(results, indent=2) + "\n"])
    chain.chain_report(results, output_dir)
    print(win_rate_table(rates))


# ---- export --------------------------------------------------------------------------------------


def export(answers: Sequence[Answers], config: JudgementsConfig) -> int:
    """Write both files; how many comparisons they hold.

    Raises:
        UserError: an unknown system, fewer than two, or files that are there: somebody may be
            judging them.
    """
    known, key_file = system_names(answers), Path(config.output_dir) / KEY
    chosen = [name for name in known if name in config.systems or not config.systems]
    if len(chosen) < 2 or not set(config.systems) <= set(known):
        raise UserError(f"--systems is {config.systems}; it must name two of {', '.join(known)}.")
    if key_file.exists():
        raise UserError(f"{key_file} is there; move it away to export anew.")
    lines, keys = {}, {}
    for row in answers[: config.num_prompts or None]:
        for b, a in combinations(chosen, 2):
            if row.pair(a, b):
                first, second = (b, a) if is_swapped(config.seed, a, b, row.id) else (a, b)
                name = comparison_id(row, first, second, config.seed)
                texts = {"first": text_of(row, first), "second": text_of(row, second)}
                lines[name] = {"id": name, "prompt": row.prompt, **texts}
                names = {"first": first, "second": second}
                keys[name] = {"id": name, "row": row.id, **names, "seed": config.seed}
    for file, found in ((key_file.with_name(COMPARISONS), lines), (key_file, keys)):
        in_order = (json_line(found[name]) for name in sorted(found))  # a hash: as good as a draw
        file.write_text("".join(in_order), encoding="utf-8")
    return len(keys)


def comparison_id(row: Answers, first: str, second: str, seed: int) -> str:
    """A hash of the seed, the row, the names and the texts: other texts have other ids."""
    texts = [row.prompt, text_of(row, first), text_of(row, second)]
    parts = json.dumps([seed, row.id, first, second, *texts])
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


# ---- import --------------------------------------------------------------------------------------


def with_outside_verdicts(answers: Sequence[Answers], config: JudgementsConfig) -> list[Answers]:
    """The answers with a judge's verdicts in the place of those it gave before.

    Raises:
        UserError: nothing was exported, the completions have changed since, the judge has the name
            of a reward, or a verdict is unknown, doubled, missing or none of WINNERS.
    """
    judge, key_file = config.judge, Path(config.output_dir) / KEY
    keys = {key["id"]: key for key in read_jsonl(key_file)}
    if not keys:
        raise UserError(f"{key_file} is not there: export comparisons before verdicts.")
    if judge in reward_judges(answers):
        raise UserError(f"--judge is {judge!r}, which is a reward's name; choose another.")
    winners = read_winners(Path(config.verdicts), set(keys))
    found = {row.id: [v for v in row.verdicts if v.judge != judge] for row in answers}
    by_row = {row.id: row for row in answers}
    for name, key in keys.items():
        row, pair = by_row.get(key["row"]), (key["first"], key["second"])
        is_there = row is not None and set(pair) <= set(system_names([row]))
        if row is None or not is_there or comparison_id(row, *pair, key["seed"]) != name:
            raise UserError(
                f"{completions.FILE} has changed since comparison {name!r} was exported; the "
                "verdicts are on other texts."
            )
        found[row.id].append(Verdict(*pair, judge, WINNERS[winners[name]]))
    return [replace(row, verdicts=found[row.id]) for row in answers]


def read_winners(file: Path, ids: set[str]) -> dict[str, str]:
    """The winner of every comparison by id.

    Raises:
        UserError: the file cannot be read, or does not name every id once.
    """
    if not file.is_file():
        raise UserError(f"--verdicts {file} is no file.")
    try:
        lines = read_jsonl(file)
    except RuntimeError as error:
        raise UserError(f"--verdicts {str(error).rstrip('.')}.") from None
    winners: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        given = line if isinstance(line, dict) else {}
        name, winner = str(given.get("id")), str(given.get("winner"))
        if name not in ids or name in winners or winner not in WINNERS:
            raise UserError(
                f"--verdicts {file}, line {number}: `id` is {name!r} and `winner` {winner!r}; a "
                f"line needs the id of a comparison, each once, and as winner {', '.join(WINNERS)}."
            )
        winners[name] = winner
    missing = sorted(ids - set(winners))
    if missing:
        raise UserError(
            f"--verdicts {file} has no verdict on {len(missing)} of {len(ids)} comparisons, the "
            f"first of which is {missing[0]!r}."
        )
    return winners


def command() -> None:
    """Run `main` with the config that the command line gives."""
    run_command(lambda: main(parse(JudgementsConfig)))


if __name__ == "__main__":
    command()
