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

The data is any with prompts and pairs. Stages run as child processes, policies are measured in this
process, and nothing is done twice. Three seeds of the demo take about half an hour of one core.
Writes `results.json`, `report.html`, `report.md` and `plots/` to output_dir.
"""

import json
from pathlib import Path

from common import distributed
from common.config.parser import parse
from common.launch import leave
from common.record import run_folder
from experiments.runs.engine import run_all
from experiments.runs.overoptimization import page
from experiments.runs.overoptimization.config import OveroptimizationConfig
from experiments.runs.overoptimization.runs import run_seed, seed_task
from experiments.runs.overoptimization.summary import summarise
from experiments.runs.stages import exit_with_status


def main(config: OveroptimizationConfig) -> None:
    """Make the runs of every seed, measure their policies, write the results and the page."""
    distributed.start(config.ddp_timeout)
    output_dir = Path(config.output_dir)
    run_folder.save_run_files(output_dir, config, config.num_processes)
    if config.executor == "slurm" or (config.is_apart and len(config.seeds) > 1):
        run_all([seed_task(config, seed) for seed in config.seeds], config, output_dir)
    seeds = [run_seed(config, seed) for seed in config.seeds]  # what was made is only read
    results = {"settings": config.settings, **summarise(seeds, config.best_of)}
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    (output_dir / "results.json").write_text(text, encoding="utf-8")
    for path in page.write(results, output_dir):
        print(f"wrote {path}", flush=True)


def run() -> None:
    """Run the experiment that the command line asks for, and end its process group."""
    main(parse(OveroptimizationConfig))
    leave()


if __name__ == "__main__":
    exit_with_status(run)
