r"""What a run will take, without running it: memory of a rank, tokens and operations of a step.

    python -m experiments.plan train_grpo.py --config assets/recipes/tldr-gpt2/grpo.yaml \
        --device cuda --ranks 1 8 64

What follows the script are its own flags. Nothing is trained or written, and nothing read but the
models' configurations, for which a config .json will do, that of a reward model too. Lengths are
the limits of the config: shorter rows take less.
"""

import argparse

from common import distributed
from common.config.parser import parse
from common.record.terminal import run_command
from experiments.plan import page
from experiments.runs.stages import config_class

SCRIPTS = ("train_sft.py", "train_reward.py", "train_dpo.py", "train_grpo.py")


def main() -> None:
    """Print the plan."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=text, allow_abbrev=False, prog="experiments.plan"
    )
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="processes to plan for")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    args, flags = parser.parse_known_args()
    distributed.quieten()
    config = parse(config_class(args.script), flags)
    print(page.page(page.make_run(config, on_gpu=args.device == "cuda"), args.ranks))


if __name__ == "__main__":
    run_command(main)
