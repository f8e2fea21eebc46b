"""Over-optimisation: the optimised reward keeps rising where the wanted one turns.

    make overoptimization
    python -m experiments.runs.overoptimization \
        --config assets/recipes/overoptimization/demo.yaml --gold my/large/reward/model

Gao et al. (2022), "Scaling Laws for Reward Model Overoptimization", with a proxy reward model that
was trained on few pairs, a gold judge that no policy sees, and policies that go further and further
from the SFT policy, d = sqrt(KL(pi || SFT)):

1. best of n: of n completions the one with the highest proxy reward, estimated for every n from
   one pool of samples; its KL is known in closed form, an upper bound here (`curves.py`);
2. rejection: supervised fine-tuning on the best of n completions of training prompts;
3. DPO over beta, on pairs of SFT completions that the proxy has labelled;
4. GRPO over its steps: the policy of each checkpoint.

How this differs from the paper:
1. Each seed trains its SFT policy, and its proxy on other pairs.
2. KL is measured on whole completions, by the mean of log pi - log SFT over the policy's samples.
3. Rewards are not scaled; the paper scales reward models to unit variance. In the picture of the
   curves the unit of each judge is the standard deviation of the SFT policy's samples.

The data is any with prompts and pairs. Every run is a stage script, `evaluate.py` measures, and no
run is made twice; the policies of a seed are one evaluation. A seed with a run that failed holds
back no other. Three seeds of the demo take about half an hour of one core. `--dry_run` prints the
runs with their commands.
Writes `results.json`, `report.html`, `report.md` and `plots/` to output_dir.
"""

from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path

from common.config.parser import parse
from common.errors import UserError
from common.record import environment
from experiments.runs.engine import print_runs, run_stages
from experiments.runs.executors import EngineFlags
from experiments.runs.outcomes import write_results
from experiments.runs.overoptimization.config import OveroptimizationConfig
from experiments.runs.overoptimization.report import report_blocks
from experiments.runs.overoptimization.runs import Chain
from experiments.runs.overoptimization.summary import summarise
from experiments.runs.stages import StageFailed, check_flags, exit_with_status, is_finished


def main(config: OveroptimizationConfig) -> None:
    """Make the runs of every seed, and report what they measured."""
    output_dir = Path(config.output_dir)
    chains = [Chain(config, seed) for seed in config.seeds]
    if config.dry_run:
        planned = [run for each in chains for run in each.planned()]
        check_flags(planned)
        print_runs(planned)
        print("# then evaluate.py of each seed's policies, GRPO's checkpoints among them")
        return
    environment.save_run_files(output_dir, config, config.num_processes)
    run_dirs: list[Path] = []
    failures: list[Exception] = []
    left = [each.phases() for each in chains]  # of seeds without a failure
    while phases := [(rest, phase) for rest in left if (phase := next(rest, None)) is not None]:
        stages = list(chain.from_iterable(phase for _, phase in phases))
        check_flags(stages)
        try:
            run_stages(stages, config, output_dir)
        except (UserError, StageFailed) as error:
            failures.append(error)
        run_dirs += [stage.output_dir for stage in stages]
        left = [rest for rest, phase in phases if all(map(is_finished, phase))]
    if failures:
        raise type(failures[0])("\n".join(map(str, failures)))
    engine = {f.name for f in fields(EngineFlags)}  # changes no result
    results = {
        "settings": {k: v for k, v in asdict(config).items() if k not in engine},
        **summarise([each.points() for each in chains], config.best_of),
    }
    facts = {"data set": config.dataset_name, "gold": config.gold}
    facts["seeds"] = ", ".join(map(str, config.seeds))
    blocks = report_blocks(results, output_dir / "plots")
    file, title = output_dir / "results.json", "Over-optimisation"
    write_results(file, results, title, blocks, facts, run_dirs)


if __name__ == "__main__":
    exit_with_status(lambda: main(parse(OveroptimizationConfig)))
