"""What does each detail matter? Variants of a base chain over several seeds, and effect sizes.

    python -m common.experiments.sweep --config assets/recipes/ablations/demo.yaml

For each seed the base chain is trained once, then every variant of it (`sweep_file.py` says how a
sweep is written down). All runs of a seed are judged together, on the same held-out rows. The
effect of a variant is its outcome minus the base's of the same seed; printed is the mean over
seeds with Student's 95% interval, and n. Runs that are finished are not made again, so the command
goes on where it was stopped, and a line that is added to the file costs its own runs only. With
`--finished_only` the lines that are not finished yet are left out.

Writes `sweep.json`, `plots/forest.png`, `report.html` and `report.md` to the sweep's `output_dir`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from common.config import UserError
from common.experiments import forest
from common.experiments.outcomes import about, commits, outcome_of, spread, systems_by_run
from common.experiments.seed_statistics import SeedMean, over_seeds, paired_difference
from common.experiments.stages import exit_with_status, run
from common.experiments.sweep_file import Sweep, Variant, read_sweep
from common.experiments.sweep_runs import (
    evaluations,
    finished_part,
    folders_of,
    run_dirs,
    training,
    training_minutes,
)
from common.record.terminal import NOT_MEASURED, markdown_table
from common.report.blocks import Block, Picture, Section, Table, Text
from common.report.page import write_page


@dataclass(frozen=True)
class Effect:
    """What a variant changes, in one outcome."""

    variant: Variant
    stage: str
    outcome: str
    values: Sequence[float]  # by seed
    base: Sequence[float]  # by seed
    difference: SeedMean


def main(argv: Sequence[str] | None = None) -> None:
    """Train, judge, compare, report."""
    arguments = command_line(argv)
    sweep = read_sweep(arguments.config)
    if arguments.seeds:
        sweep = replace(sweep, seeds=arguments.seeds)
    if arguments.output_dir:
        sweep = replace(sweep, output_dir=arguments.output_dir)
    if arguments.finished_only:
        sweep = finished_part(sweep)
    # Line by line, each with all seeds: what was made is of use wherever this is stopped.
    for of_seeds in zip(*(training(sweep, seed) for seed in sweep.seeds), strict=True):
        for stage, num_processes in of_seeds:
            run(stage, num_processes)
    for seed in sweep.seeds:
        for stage in evaluations(sweep, seed):
            run(stage)
    outcomes = {seed: measured(sweep, seed) for seed in sweep.seeds}
    sweep = replace(sweep, variants=by_detail(sweep.variants))
    found = effects(sweep, outcomes)
    write_results(sweep, outcomes, found)
    print(f"\n{tables_as_text(sweep, outcomes, found)}\n\nreport: {sweep.output_dir}/report.html")


def command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments.

    Raises:
        UserError: one is unknown or missing.
    """

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message.rstrip('.')} (see --help for the flags).")

    parser = Parser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the sweep, a YAML file")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those in the file")
    parser.add_argument(
        "--finished_only", action="store_true", help="leave out the lines that still need runs"
    )
    parser.add_argument("--output_dir", default="", help="instead of the one in the file")
    return parser.parse_args(argv)


# ---- outcomes ------------------------------------------------------------------------------------


def measured(sweep: Sweep, seed: int) -> dict[str, dict[str, float]]:
    """The outcomes of every judged run of a seed, by its folder.

    Raises:
        UserError: an outcome was not measured in one of them.
    """
    systems: dict[str, dict[str, Any]] = {}
    for stage in evaluations(sweep, seed):
        systems |= systems_by_run(stage.output_dir)
    found: dict[str, dict[str, float]] = {}
    for variant in (None, *sweep.variants):
        folders = folders_of(sweep, seed, variant)
        for name in [variant.judged] if variant else list(sweep.base):
            for outcome in sweep.base[name].outcomes:
                value = outcome_of(outcome, folders[name], systems)
                if value is None:
                    raise UserError(
                        f"the outcome {outcome!r} was not measured in {folders[name]}; leave it "
                        "out."
                    )
                found.setdefault(str(folders[name]), {})[outcome] = value
    return found


def base_values(sweep: Sweep, outcomes: Any, stage: str, outcome: str) -> list[float]:
    """An outcome of the base chain, by seed."""
    return [
        outcomes[seed][str(folders_of(sweep, seed, None)[stage])][outcome] for seed in sweep.seeds
    ]


def effects(
    sweep: Sweep, outcomes: Mapping[int, Mapping[str, Mapping[str, float]]]
) -> list[Effect]:
    """Every variant's difference to the base in every outcome of its stage."""
    found = []
    for variant in sweep.variants:
        stage = variant.judged
        for outcome in sweep.base[stage].outcomes:
            base = base_values(sweep, outcomes, stage, outcome)
            values = [
                outcomes[seed][str(folders_of(sweep, seed, variant)[stage])][outcome]
                for seed in sweep.seeds
            ]
            difference = paired_difference(values, base)
            found.append(Effect(variant, stage, outcome, values, base, difference))
    return found


def by_detail(variants: Sequence[Variant]) -> list[Variant]:
    """The variants with those of a detail next to each other."""
    details = list(dict.fromkeys(variant.detail for variant in variants))
    return sorted(variants, key=lambda variant: details.index(variant.detail))


# ---- results -------------------------------------------------------------------------------------


def write_results(sweep: Sweep, outcomes: Any, found: Sequence[Effect]) -> None:
    """Write `sweep.json`, the picture and the report."""
    output_dir = Path(sweep.output_dir)
    record = {
        "seeds": list(sweep.seeds),
        "git_commits": commits(run_dirs(sweep)),
        "training_minutes": round(training_minutes(sweep), 2),
        "base": [
            {
                "stage": stage,
                "outcome": outcome,
                "unit": about(outcome).unit,
                "by_seed": (values := base_values(sweep, outcomes, stage, outcome)),
                **asdict(over_seeds(values)),
            }
            for stage, outcome in judgements(sweep)
        ],
        "effects": [
            {
                **asdict(effect.variant),
                "judged": effect.stage,
                "outcome": effect.outcome,
                "unit": about(effect.outcome).unit,
                "by_seed": list(effect.values),
                "base_by_seed": list(effect.base),
                "difference": asdict(effect.difference),
            }
            for effect in found
        ],
    }
    (output_dir / "sweep.json").write_text(json.dumps(record, indent=1) + "\n")
    picture = forest.draw(panels(sweep, found), output_dir / "plots" / "forest.png")
    write_page(output_dir, sweep.title, blocks(sweep, outcomes, found, picture), facts(sweep))


def judgements(sweep: Sweep) -> list[tuple[str, str]]:
    """Every stage that is judged with every outcome of it."""
    return [(name, outcome) for name, stage in sweep.base.items() for outcome in stage.outcomes]


def facts(sweep: Sweep) -> dict[str, str]:
    """What stands below the report's title."""
    seeds = ", ".join(map(str, sweep.seeds))
    return {
        "seeds": seeds,
        "commits of the runs": ", ".join(commit[:16] for commit in commits(run_dirs(sweep))),
        "training": f"{training_minutes(sweep):.0f} minutes in all",
    }


def panels(sweep: Sweep, found: Sequence[Effect]) -> list[forest.Panel]:
    """A panel of the picture for each stage and outcome."""
    result = []
    for stage, outcome in judgements(sweep):
        rows = [
            forest.Row(
                f"{effect.variant.detail}: {effect.variant.choice}",
                [v - b for v, b in zip(effect.values, effect.base, strict=True)],
                effect.difference,
                is_patched=bool(effect.variant.patch),
            )
            for effect in found
            if (effect.stage, effect.outcome) == (stage, outcome)
        ]
        if rows:
            title = f"{stage}: {about(outcome).label}"
            result.append(forest.Panel(stage, title, about(outcome).unit, rows))
    return result


def table(sweep: Sweep, outcomes: Any, found: Sequence[Effect], stage: str) -> Table:
    """Base values and differences of one stage."""
    names = list(sweep.base[stage].outcomes)
    headers = ["detail", "choice", *(f"{about(n).label}, {about(n).unit}" for n in names), "n"]
    base = [over_seeds(base_values(sweep, outcomes, stage, name)) for name in names]
    rows = [["base", "as in the recipe", *map(spread, base), str(len(sweep.seeds))]]
    own = [effect for effect in found if effect.stage == stage]
    for variant in dict.fromkeys(effect.variant.slug for effect in own):
        mine = {e.outcome: e for e in own if e.variant.slug == variant}
        first = mine[names[0]]
        rows.append(
            [
                first.variant.detail,
                first.variant.choice + (" (patch)" if first.variant.patch else ""),
                *(difference_cell(mine[name].difference) for name in names),
                str(first.difference.n),
            ]
        )
    return Table(headers, rows)


def difference_cell(difference: SeedMean) -> str:
    """Mean difference with its interval; a star where that excludes 0."""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.2f}"
    star = " *" if difference.excludes_zero else ""
    return f"{difference.mean:+.2f}{star} [{difference.low:+.2f}, {difference.high:+.2f}]"


def stages_with_variants(sweep: Sweep) -> list[str]:
    """In the order of the chain."""
    return [name for name in sweep.base if any(v.judged == name for v in sweep.variants)]


def blocks(
    sweep: Sweep, outcomes: Any, found: Sequence[Effect], picture: Path | None
) -> list[Block]:
    """The report."""
    num_clear = sum(effect.difference.excludes_zero for effect in found)
    num_varying = sum(bool(effect.difference.sd) for effect in found)
    reading = (
        f"Each row is the base chain with one thing changed, for the seeds {list(sweep.seeds)}. "
        "A base row has mean \N{PLUS-MINUS SIGN} standard deviation over seeds; every other row "
        "the mean difference to the base of the same seed, with Student's 95% interval over seeds. "
        f"A star marks an interval that excludes 0: {num_clear} of the {num_varying} do whose "
        f"values vary, and if nothing mattered about {0.05 * num_varying:.1f} would. The intervals "
        "cover the seed of training, not the draw of the held-out rows, which all runs share. "
        f"{NOT_MEASURED} means that it was not measured. A patch re-enacts a known error of other "
        "code, or dropout; the scripts themselves have no flag for it."
    )
    result: list[Block] = [Text(reading)]
    if picture:
        caption = "Difference to the base of the same seed: mean, 95% interval, and each seed."
        result.append(Picture(picture, caption))
    for stage in stages_with_variants(sweep):
        result.append(Section(stage, [table(sweep, outcomes, found, stage)]))
    return result


def tables_as_text(sweep: Sweep, outcomes: Any, found: Sequence[Effect]) -> str:
    """The tables for the terminal."""
    tables = [table(sweep, outcomes, found, stage) for stage in stages_with_variants(sweep)]
    return "\n\n".join(markdown_table(t.headers, t.rows) for t in tables)


if __name__ == "__main__":
    exit_with_status(main)
