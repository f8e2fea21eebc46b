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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.config import Parser
from common.errors import UserError
from common.evaluation.score import run_cost
from common.experiments import forest
from common.experiments.forest import Effect
from common.experiments.outcomes import (
    about,
    commits,
    outcome_of,
    over_seeds,
    paired_difference,
    systems_by_run,
)
from common.experiments.stages import exit_with_status, is_finished, run
from common.experiments.sweep_file import Sweep, Variant, read_sweep
from common.record.terminal import NOT_MEASURED
from common.report.blocks import Block, Picture, Section, Table, Text
from common.report.page import write_page

Outcomes = Mapping[int, Mapping[str, Mapping[str, float]]]  # by seed, folder of the run, name


def main(argv: Sequence[str] | None = None) -> None:
    """Train, judge, compare, report."""
    arguments = command_line(argv)
    sweep = read_sweep(arguments.config)
    sweep = replace(
        sweep,
        seeds=arguments.seeds or sweep.seeds,
        output_dir=arguments.output_dir or sweep.output_dir,
    )
    if arguments.finished_only:
        sweep = finished_part(sweep)
    # Line by line, each with all seeds: what was made is of use wherever this is stopped.
    for of_seeds in zip(*map(sweep.training, sweep.seeds), strict=True):
        for stage, num_processes in of_seeds:
            run(stage, num_processes)
    for seed in sweep.seeds:
        for stage in sweep.evaluations(seed):
            run(stage)
    outcomes = {seed: measured(sweep, seed) for seed in sweep.seeds}
    details = list(dict.fromkeys(variant.detail for variant in sweep.variants))
    in_order = sorted(sweep.variants, key=lambda variant: details.index(variant.detail))
    sweep = replace(sweep, variants=in_order)
    write_results(sweep, outcomes, effects(sweep, outcomes))


def command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; a UserError if one is unknown or missing."""
    parser = Parser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the sweep, a YAML file")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those in the file")
    parser.add_argument(
        "--finished_only", action="store_true", help="leave out the lines that still need runs"
    )
    parser.add_argument("--output_dir", default="", help="instead of the one in the file")
    return parser.parse_args(argv)


def finished_part(sweep: Sweep) -> Sweep:
    """The sweep without the variants of which a training run is not finished, for any seed."""
    unfinished = {
        stage.output_dir.parent.name
        for seed in sweep.seeds
        for stage, _ in sweep.training(seed)
        if not is_finished(stage)
    }
    return replace(sweep, variants=[v for v in sweep.variants if v.slug not in unfinished])


# ---- outcomes ------------------------------------------------------------------------------------


def measured(sweep: Sweep, seed: int) -> dict[str, dict[str, float]]:
    """The outcomes of every judged run of a seed, by its folder.

    Raises:
        UserError: an outcome was not measured in one of them.
    """
    systems: dict[str, dict[str, Any]] = {}
    for stage in sweep.evaluations(seed):
        systems |= systems_by_run(stage.output_dir)
    runs = list(sweep.folders(seed).items())
    runs += [(v.judged, sweep.folders(seed, v)[v.judged]) for v in sweep.variants]
    found: dict[str, dict[str, float]] = {}
    for name, run_dir in runs:
        for outcome in sweep.base[name].outcomes:
            value = outcome_of(outcome, run_dir, systems)
            if value is None:
                raise UserError(
                    f"the outcome {outcome!r} was not measured in {run_dir}; leave it out."
                )
            found.setdefault(str(run_dir), {})[outcome] = value
    return found


def by_seed(
    sweep: Sweep, outcomes: Outcomes, stage: str, outcome: str, variant: Variant | None = None
) -> list[float]:
    """An outcome of a stage, of the base chain or of a variant."""
    return [outcomes[s][str(sweep.folders(s, variant)[stage])][outcome] for s in sweep.seeds]


def effects(sweep: Sweep, outcomes: Outcomes) -> list[Effect]:
    """Every variant's difference to the base in every outcome of its stage."""
    found = []
    for variant in sweep.variants:
        for outcome in sweep.base[variant.judged].outcomes:
            base = by_seed(sweep, outcomes, variant.judged, outcome)
            values = by_seed(sweep, outcomes, variant.judged, outcome, variant)
            found.append(Effect(variant, outcome, values, base, paired_difference(values, base)))
    return found


# ---- results -------------------------------------------------------------------------------------


def write_results(sweep: Sweep, outcomes: Outcomes, found: Sequence[Effect]) -> None:
    """Write `sweep.json`, the picture and the report; print the tables."""
    output_dir, run_dirs = Path(sweep.output_dir), sweep.run_dirs()
    minutes = sum(run_cost(run_dir).get("elapsed_minutes", 0.0) for run_dir in run_dirs)
    judged = [(name, o) for name, stage in sweep.base.items() for o in stage.outcomes]
    made_with = commits(run_dirs)
    record = {
        "seeds": list(sweep.seeds),
        "git_commits": made_with,
        "training_minutes": round(minutes, 2),
        "base": [
            {
                "stage": stage,
                "outcome": outcome,
                "unit": about(outcome).unit,
                "by_seed": (values := by_seed(sweep, outcomes, stage, outcome)),
                **asdict(over_seeds(values)),
            }
            for stage, outcome in judged
        ],
        "effects": [
            {
                **asdict(effect.variant),
                "judged": effect.variant.judged,
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
    panels = {key: [e for e in found if (e.variant.judged, e.outcome) == key] for key in judged}
    picture = forest.draw(panels, output_dir / "plots" / "forest.png")
    varied = [name for name in sweep.base if any(v.judged == name for v in sweep.variants)]
    tables = {stage: table(sweep, outcomes, found, stage) for stage in varied}
    facts = {
        "seeds": ", ".join(map(str, sweep.seeds)),
        "commits of the runs": ", ".join(commit[:16] for commit in made_with),
        "training": f"{minutes:.0f} minutes in all",
    }
    write_page(output_dir, sweep.title, blocks(sweep, found, picture, tables), facts)
    text = "\n\n".join(map(str, tables.values()))
    print(f"\n{text}\n\nreport: {output_dir}/report.html")


def table(sweep: Sweep, outcomes: Outcomes, found: Sequence[Effect], stage: str) -> Table:
    """Base values and differences of one stage."""
    names = list(sweep.base[stage].outcomes)
    headers = ["detail", "choice", *(about(name).heading for name in names), "n"]
    base = [over_seeds(by_seed(sweep, outcomes, stage, name)).spread for name in names]
    rows = [["base", "as in the recipe", *base, str(len(sweep.seeds))]]
    for variant in sweep.variants:
        if variant.judged == stage:
            own = [effect.difference for effect in found if effect.variant is variant]
            choice = variant.choice + (" (patch)" if variant.patch else "")
            cells = [difference.difference for difference in own]
            rows.append([variant.detail, choice, *cells, str(own[0].n)])
    return Table(headers, rows)


def blocks(
    sweep: Sweep, found: Sequence[Effect], picture: Path | None, tables: Mapping[str, Table]
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
    caption = "Difference to the base of the same seed: mean, 95% interval, and each seed."
    pictures: list[Block] = [Picture(picture, caption)] if picture else []
    return [Text(reading), *pictures, *(Section(stage, [own]) for stage, own in tables.items())]


if __name__ == "__main__":
    exit_with_status(main)
