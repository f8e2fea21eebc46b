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
from typing import Any

from common.config import flag, parse
from common.errors import UserError, check_fields
from common.evaluation import completions
from common.evaluation.completions import REFERENCE, Answers, Verdict, system_names
from common.evaluation.judges import is_swapped, text_of
from common.evaluation.win_rates import all_win_rates, reward_judges
from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.record.terminal import markdown_table, run_command
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
    chain.chain_report(results, chain.run_dirs(results["systems"]), output_dir)
    table = win_rate_table(rates)
    print(markdown_table(table.headers, table.rows))


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
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for row in answers[: config.num_prompts or None]:
        for b, a in combinations(chosen, 2):
            if row.of(a) and row.of(b):
                first, second = (b, a) if is_swapped(config.seed, a, b, row.id) else (a, b)
                name = comparison_id(row, first, second, config.seed)
                texts = {"first": text_of(row, first), "second": text_of(row, second)}
                line = {"id": name, "prompt": row.prompt, **texts}
                key = {"id": name, "row": row.id, "first": first, "second": second}
                found.append((line, key | {"seed": config.seed}))
    found.sort(key=lambda pair: str(pair[0]["id"]))  # a hash: as good as a draw
    for number, file in enumerate((key_file.with_name(COMPARISONS), key_file)):
        file.write_text("".join(json_line(pair[number]) for pair in found), encoding="utf-8")
    return len(found)


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
    found: dict[int, list[Verdict]] = {row.id: [] for row in answers}
    by_row = {row.id: row for row in answers}
    for key in keys.values():
        refuse_changed(by_row.get(key["row"]), key)
    for name, winner in read_winners(Path(config.verdicts), set(keys)).items():
        key = keys[name]
        found[key["row"]].append(Verdict(key["first"], key["second"], judge, WINNERS[winner]))
    return [
        replace(row, verdicts=[v for v in row.verdicts if v.judge != judge] + found[row.id])
        for row in answers
    ]


def refuse_changed(row: Answers | None, key: dict[str, Any]) -> None:
    """Raise a UserError unless the row still holds what was exported under this id."""
    pair = (key["first"], key["second"])
    is_there = row is not None and all(name in system_names([row]) for name in pair)
    if row is None or not is_there or comparison_id(row, *pair, key["seed"]) != key["id"]:
        raise UserError(
            f"{completions.FILE} has changed since comparison {key['id']!r} was exported; the "
            "verdicts are on other texts."
        )


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
        where = f"--verdicts {file}, line {number}"
        if not isinstance(line, dict) or not {"id", "winner"} <= line.keys():
            raise UserError(f"{where}: needs `id` and `winner`.")
        name, winner = str(line["id"]), line["winner"]
        if name not in ids:
            raise UserError(f"{where}: there is no comparison {name!r}.")
        if name in winners:
            raise UserError(f"{where}: comparison {name!r} is there twice.")
        if str(winner) not in WINNERS:
            raise UserError(f"{where}: winner is {winner!r}; it must be {', '.join(WINNERS)}.")
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
