r"""What a run will take, without running it: memory of a rank, tokens and operations of a step.

    python -m experiments.plan train_grpo.py --config assets/recipes/tldr-gpt2/grpo.yaml \
        --device cuda --ranks 1 8 64

What follows the script are its own flags; --output_dir is not needed. Nothing is trained or
written, and nothing read but the models' configurations: folders, or config .json files. A model
that is not there yet may be planned by another of its shape: one folder may be policy and reward
model. Lengths are the limits of the config: shorter rows take less.
"""

import argparse
from collections.abc import Iterator, Sequence

from common import distributed
from common.config.parser import parse
from common.record.terminal import (
    folded,
    format_number,
    line_width,
    markdown_table,
    run_command,
)
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
    unwritten = "--output_dir=none"  # a plan writes nothing, so that it needs no folder
    config = parse(config_class(args.script), [unwritten, *flags])
    print(page(make_run(config, on_gpu=args.device == "cuda"), args.ranks))


def page(run: Run, all_ranks: Sequence[int]) -> str:
    """The plan as text, no wider than the terminal: sizes, operations, tables of each part."""
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
    lines = [
        f"plan of {config.stage}, prompts of {config.max_prompt_length} tokens with "
        f"{run.num_completions} x {config.max_completion_length}",
        *(
            f"{role}: {model.name}, {model.numbers() / 1e6:,.1f} M parameters, "
            f"{model.numbers(trained=True) / 1e6:,.1f} M trained"
            for role, model in roles
        ),
        f"a step: {config.batch_size:,} rows, {tokens:,} tokens; TFLOP: {operations}; "
        f"all {format_number(sum(work.values()) / 1e12)}",
        f"GB of a rank on a {'GPU (or --device cpu)' if run.on_gpu else 'CPU'} when it holds most "
        "(1 GB = 10^9 bytes):",
    ]
    width = line_width()
    return "\n".join([*(folded(line, width) for line in lines), *tables(run, all_ranks, width)])


def tables(run: Run, all_ranks: Sequence[int], width: int) -> list[str]:
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
        *side_by_side(["ranks", "micro-batches", *COLUMNS, "peak", "when", last], at_worst, width),
        "GB at each moment:",
        *side_by_side(["ranks", *(moment.name for moment in every)], at_each, width),
    ]
    if run.on_gpu:
        lines += [
            folded(
                "CUDA and NCCL themselves, and gaps between allocations, are not counted", width
            ),
            "GB of a rank on its host, beside Python and its libraries:",
            *side_by_side(["ranks", *HOST_COLUMNS], on_host, width),
        ]
    return lines


def side_by_side(
    labels: Sequence[str], columns: Sequence[Sequence[str]], width: int
) -> Iterator[str]:
    """A table of columns behind their labels; several below each other where it is too wide."""
    cell = 3 + max(3, *(len(text) for column in columns for text in column))  # with its bar
    number = max(1, (width - len("|  |") - max(map(len, labels))) // cell)  # of columns in a table
    for start in range(0, len(columns), number):
        if start:
            yield ""  # where another table begins
        head, *rows = zip(labels, *columns[start : start + number], strict=True)
        yield markdown_table(head, rows)


if __name__ == "__main__":
    run_command(main)
