r"""What a run will take, without running it: memory of a rank, tokens and operations of a step.

    python -m experiments.plan train_grpo.py --config assets/recipes/tldr-gpt2/grpo.yaml \
        --device cuda --ranks 1 8 64

What follows the script are its own flags. Nothing is trained or written, and nothing read but the
models' configurations, for which a config .json will do, that of a reward model too. Lengths are
the limits of the config: shorter rows take less.
"""

import argparse
from collections.abc import Sequence

from common import distributed
from common.config.parser import parse
from common.record.terminal import format_number, markdown_table, run_command
from experiments.plan.memory import COLUMNS, HOST_COLUMNS, gigabytes, host_bytes, moments, peak
from experiments.plan.work import Run, make_run, micro_batch, piece_tokens, step_flops
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
    print(page(make_run(config, on_gpu=args.device == "cuda"), args.ranks))


def page(run: Run, all_ranks: Sequence[int]) -> str:
    """The plan as text: sizes, operations, and tables by number of ranks."""
    config = run.config
    for ranks in all_ranks:
        distributed.refuse_replicas(config.num_replicas, ranks)
        distributed.refuse_uneven(config.batch_size, ranks)
    roles = [("trained model", run.policy)]
    roles += [("reference", run.reference)] if run.reference else []
    roles += [("reward model", model) for model in run.reward_models]
    tokens = config.batch_size * piece_tokens(run, run.num_completions)
    work = step_flops(run)
    operations = ", ".join(f"{name} {format_number(n / 1e12)}" for name, n in work.items())
    return "\n".join(
        [
            f"plan of {config.stage}, prompts of {config.max_prompt_length} tokens with "
            f"{run.num_completions} x {config.max_completion_length}",
            *(
                f"{role}: {model.name}, {model.numbers() / 1e6:,.1f} M parameters, "
                f"{model.numbers(trained=True) / 1e6:,.1f} M trained"
                for role, model in roles
            ),
            f"a step: {config.batch_size:,} rows, {tokens:,} tokens; TFLOP: {operations}; "
            f"all {format_number(sum(work.values()) / 1e12)}",
            f"GB of a rank on {'a GPU' if run.on_gpu else 'a CPU'} when it holds most "
            "(1 GB = 10^9 bytes):",
            *tables(run, all_ranks),
        ]
    )


def tables(run: Run, all_ranks: Sequence[int]) -> list[str]:
    """By number of ranks: what is held at the worst moment, at each one, and on a GPU's host."""
    is_sharded = run.config.shard_gradients
    other = run.with_flags(shard_gradients=not is_sharded)
    at_worst, at_each, on_host = [], [], []
    for ranks in all_ranks:
        here = run.on(ranks)
        every, most = moments(here), peak(here)
        cells = [gigabytes(most.columns.get(column, 0.0)) for column in COLUMNS]
        peaks = [gigabytes(most.total), most.name, gigabytes(peak(other.on(ranks)).total)]
        at_worst.append([f"{ranks}", f"{micro_batch(here).number}", *cells, *peaks])
        at_each.append([f"{ranks}", *(gigabytes(moment.total) for moment in every)])
        on_host.append([f"{ranks}", *map(gigabytes, host_bytes(here))])
    last = f"peak, {'whole' if is_sharded else 'sharded'} gradients"
    lines = [
        markdown_table(["ranks", "micro-batches", *COLUMNS, "peak", "when", last], at_worst),
        "GB at each moment:",
        markdown_table(["ranks", *(moment.name for moment in every)], at_each),
    ]
    if run.on_gpu:
        lines += [
            "CUDA and NCCL themselves, and gaps between allocations, are not counted",
            "GB of a rank on its host, beside Python and its libraries:",
            markdown_table(["ranks", *HOST_COLUMNS], on_host),
        ]
    return lines


if __name__ == "__main__":
    run_command(main)
