"""What does each detail matter? Variants of a base chain over several seeds, and effect sizes.

    python -m experiments.runs.sweep --config assets/recipes/ablations/demo.yaml

For each seed the base chain is trained once, then every variant of it (`sweep_file.py` has the
format of the file). All runs of a seed are judged together, on the same held-out rows. The effect
of a variant is its outcome minus the base's of the same seed: mean over seeds with Student's 95%
interval, and for a stage's first outcome the interval that holds together with those of the
stage's other variants. Finished runs are not repeated, so the command resumes where it was stopped,
and a new line in the file costs its runs only. `--dry_run` prints the runs with their commands.

Writes `sweep.json`, `plots/forest.png`, `report.html` and `report.md` to the sweep's `output_dir`.
"""

import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.config.parser import Parser, add_flag, underscored
from common.errors import UserError
from common.evaluation.runs import run_cost
from common.report.blocks import Block, Picture, Section, Table
from experiments.runs.engine import print_runs, run_stages
from experiments.runs.executors import EngineFlags
from experiments.runs.outcomes import (
    Measured,
    about,
    measured,
    over_seeds,
    systems_by_run,
    value_records,
    write_results,
)
from experiments.runs.power import HEADERS, NOTE
from experiments.runs.stages import check_flags, exit_with_status
from experiments.runs.sweep.effects import Effect, Effects, draw, effect_records
from experiments.runs.sweep.sweep_file import AS_IS, Sweep, read_sweep


def main(argv: Sequence[str] | None = None) -> None:
    """Train, judge, compare, report."""
    options: dict[str, Any] = {"allow_abbrev": False, "argument_default": SUPPRESS}
    parser = Parser(description=str(__doc__).partition("\n")[0], **options)
    parser.add_argument("--config", required=True, help="the sweep, a YAML file")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those in the file")
    parser.add_argument("--output_dir", help="instead of the one in the file")
    group = parser.add_argument_group(EngineFlags._engine)
    for field in fields(EngineFlags):
        add_flag(group, field)
    words = map(underscored, sys.argv[1:] if argv is None else argv)
    given = vars(parser.parse_args([*words]))
    names = given.keys() & {field.name for field in fields(EngineFlags)}
    engine = EngineFlags(**{name: given.pop(name) for name in names})
    sweep = read_sweep(given.pop("config"), **given)
    training = [list(sweep.training(seed)) for seed in sweep.seeds]
    evaluations = [stage for seed in sweep.seeds for stage in sweep.evaluations(seed)]
    check_flags([*training[0], *evaluations])
    # Line by line, each with all seeds: finished lines are complete wherever this is stopped.
    runs = [stage for of_seeds in zip(*training, strict=True) for stage in of_seeds]
    if engine.dry_run:
        print_runs([*runs, *evaluations])
        return
    run_stages([*runs, *evaluations], engine, Path(sweep.output_dir))
    asked = [outcome for base in sweep.base.values() for outcome in base.outcomes]
    systems = {
        seed: systems_by_run(*(stage.output_dir for stage in sweep.evaluations(seed)))
        for seed in sweep.seeds
    }
    values = measured({seed: sweep.folders(seed) for seed in sweep.seeds}, systems, asked)
    report(sweep, values, effects(sweep, values))


def effects(sweep: Sweep, values: Measured) -> Effects:
    """The effect of every variant, lines of a detail together.

    With `compared_with` also what the other stages' runs differ by, all from that stage's run.
    """

    def by_seed(run: str, outcome: str) -> list[float]:
        if len(values.get((run, outcome), {})) < len(sweep.seeds):
            raise UserError(f"the outcome {outcome!r} was not measured in {run}; leave it out.")
        return list(values[run, outcome].values())

    every, first = sweep.runs(), sweep.compared_with
    details = [line.detail for line in every.values()]
    in_order = sorted(every.items(), key=lambda item: details.index(item[1].detail))
    panels: dict[str, dict[str, list[Effect]]] = {}
    for stage in [first] if first else sweep.base:
        names = sweep.base[stage].outcomes
        if first:
            others = [item for item in in_order if item[0] != first]
            lines = [item for item in others if {*names} <= {*sweep.base[item[1].stage].outcomes}]
        else:
            variants = [item for item in in_order if item[0] not in sweep.base]
            lines = [item for item in variants if item[1].stage == stage]
        for name in names if lines else []:
            base, family = by_seed(stage, name), len(lines) if name == names[0] else 0
            panels.setdefault(stage, {})[name] = [
                Effect(variant, name, by_seed(run, name), base, family) for run, variant in lines
            ]
    return panels


# ---- results -------------------------------------------------------------------------------------


def report(sweep: Sweep, values: Measured, panels: Effects) -> None:
    """Write `sweep.json`, the picture and the report; print the tables."""
    output_dir = Path(sweep.output_dir)
    run_dirs = [stage.output_dir for seed in sweep.seeds for stage in sweep.training(seed)]
    minutes = sum(run_cost(run_dir).get("elapsed_minutes", 0.0) for run_dir in run_dirs)
    record = {
        "seeds": list(sweep.seeds),
        "training_minutes": round(minutes, 2),
        "measured": value_records(values),
        "effects": effect_records(panels),
    }
    blocks: list[Block] = [introduction(sweep)]
    if panels:
        picture = draw(panels, output_dir / "plots" / "forest.png")
        caption = "Difference to the base of the same seed: mean, 95% interval, and each seed."
        blocks.append(Picture(picture, caption))
    blocks += [Section(stage, [table(by_outcome)]) for stage, by_outcome in panels.items()]
    facts = {"seeds": ", ".join(map(str, sweep.seeds)), "training": f"{minutes:.0f} minutes in all"}
    write_results(output_dir / "sweep.json", record, sweep.title, blocks, facts, run_dirs)


def introduction(sweep: Sweep) -> str:
    """A guide to the tables."""
    row, base = "the base chain with one thing changed", "the base"
    if sweep.compared_with:
        row, base = "a run", f"{sweep.compared_with}, the base,"
    return (
        f"Each row is {row}, for the seeds {list(sweep.seeds)}. A base row has mean "
        "\N{PLUS-MINUS SIGN} standard deviation over seeds; every other row the mean difference to "
        f"{base} of the same seed, with Student's 95% interval over seeds. One star: the interval "
        "excludes 0. Two stars, and yes: also when the intervals of all lines hold together with "
        "95% (Bonferroni), for the first outcome of a stage only; else the effect is no larger "
        "than the farther end of that interval. Two columns are about a stage's first outcome "
        f"only. {NOTE}"
    )


def table(panels: Mapping[str, Sequence[Effect]]) -> Table:
    """Base values and differences of one stage, of its effects by outcome."""
    headers = ["detail", "choice", *(about(name).heading for name in panels)]
    headers += [*HEADERS, "matters?", "n"]
    base = [over_seeds(effects[0].base) for effects in panels.values()]
    rows = [["base", AS_IS, *(mean.spread for mean in base), "", "", "", str(base[0].n)]]
    for effects in zip(*panels.values(), strict=True):
        variant = effects[0].variant
        choice = f"{variant.choice} (patch)" if variant.patch else str(variant.choice)
        first, cells = effects[0], [effect.cell for effect in effects]
        cells += [*first.power.cells(), first.verdict, str(first.difference.n)]
        rows.append([str(variant.detail), choice, *cells])
    return Table(headers, rows)


if __name__ == "__main__":
    exit_with_status(main)
