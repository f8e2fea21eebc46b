"""The memory that `experiments.plan` plans, compared with what the same run takes.

    python -m assets.recipes.plans.against_run
    python -m assets.recipes.plans.against_run --cases sft dpo

Each case is planned and then run on a CPU for two steps, in processes of their own, on the fixture
of the speed benchmark (built on first use; GPT-2 small takes minutes). The run is measured by the
peak resident memory that the kernel reports of it, everything included from import to export, while
malloc gives every freed tensor back to the system (else glibc keeps freed blocks below 32 MiB).
Where the ways to add up gradients are compared, it is the peak up to the last step, as the metrics
have it (`peak_memory_gb`): exporting takes rank 0 more.

Exits with status 1 if a plan is off by more than `GOAL` of what was measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.evidence.bench import processes, sides
from experiments.evidence.bench.rows import ROWS

GOAL = 0.2  # of what was measured
STEPS = 2  # in the second the optimiser's state is there
# Of GPT-2 small a step takes minutes on a core: two rows a step will do.
SMALL = {"batch_size": 2, "micro_batch_tokens": 2048}
# Two micro-batches of a row for each of two ranks; of whole gradients the first ones' are kept.
SEVERAL = {"batch_size": 4, "micro_batch_tokens": 440}
SHARDED = SEVERAL | {"shard_gradients": "true"}
# The first is written while the second step is made; a run of before is not gone on with.
SAVING = {"save_steps": 1, "resume_from_checkpoint": "none"}
# Blocks above this many bytes are mapped, and unmapped when they are freed.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
GPT2 = "GPT2LMHeadModel"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


@dataclass(frozen=True)
class Case:
    """A run: a row of the benchmark with other flags."""

    row: str
    model: str  # of the fixture
    flags: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    # Layers and width of random weights in its place; such a run is measured up to its last step
    shape: tuple[int, int] | None = None


CASES = {
    "sft": Case("sft", "tiny", {"micro_batch_tokens": 4096}),
    "sft-long": Case("sft", "tiny", {"micro_batch_tokens": 1024}),
    "sft-checkpointed": Case("sft", "gpt2-small", SMALL | {"gradient_checkpointing": "true"}),
    "sft-lora": Case("sft", "gpt2-small", SMALL | {"lora_r": 8}),
    "sft-two-ranks": Case("sft", "gpt2-small", SMALL, ranks=2),
    "sft-bf16": Case("sft", "gpt2-small", SMALL | {"bf16": "true"}),
    "sft-saving": Case("sft", "gpt2-small", SMALL | SAVING),
    "sft-saving-at-once": Case("sft", "gpt2-small", SMALL | SAVING | {"async_save": "false"}),
    "sft-saving-two-ranks": Case("sft", "gpt2-small", SMALL | SAVING, ranks=2),
    **{
        f"sft-{width}-wide-{name}-gradients": Case(
            "sft", "gpt2-small", flags, ranks=2, shape=(layers, width)
        )
        for layers, width in ((8, 512), (12, 768), (24, 1024))  # 51 M, 124 M, 355 M parameters
        for name, flags in (("whole", SEVERAL), ("sharded", SHARDED))
    },
    "reward": Case("reward", "gpt2-small", SMALL),
    "dpo": Case("dpo-precomputed", "gpt2-small", SMALL),
    "grpo": Case("grpo-8x8", "tiny", {"micro_batch_tokens": 4096}),
    "grpo-reward-model": Case("grpo-1x8-reward-model", "gpt2-small", {"micro_batch_tokens": 1024}),
}


def arguments_of(case: Case, fixture: Path, output_dir: Path) -> list[str]:
    """The script of a case with its flags."""
    arguments = sides.our_command(ROWS[case.row], fixture, STEPS, output_dir)
    if case.shape:
        file = output_dir.with_suffix(".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = {"n_layer": case.shape[0], "n_embd": case.shape[1], "n_head": case.shape[1] // 64}
        file.write_text(json.dumps({"model_type": "gpt2", "architectures": [GPT2], **shape}))
        arguments += [f"--model_name_or_path={file}"]
        arguments += [f"--tokenizer_name_or_path={fixture / 'policy'}"]
    return arguments + [f"--{name}={value}" for name, value in case.flags.items()]


def planned(case: Case, arguments: Sequence[str], log: Path) -> dict[str, str]:
    """The plan's table, by label; of what is measured in steps only, their peak."""
    command = ["-m", "experiments.plan", *arguments, f"--ranks={case.ranks}", "--device=cpu"]
    processes.run(command, log, threads=1)
    lines = [line for line in log.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    second = next(i for i, row in enumerate(rows) if i and row[0] == "ranks")
    plan = dict(rows[:second])
    if case.shape:
        moments = dict(rows[second:])
        plan["when"] = max(("loss", "backward", "gradients"), key=lambda name: float(moments[name]))
        plan["peak"] = moments[plan["when"]]
    return plan


def measured(case: Case, arguments: Sequence[str], output_dir: Path) -> float:
    """Peak memory of the run, of its largest process, in GB."""
    launcher = [*TORCHRUN, str(case.ranks)] if case.ranks > 1 else []
    log = output_dir.with_suffix(".log")
    resident = processes.run([*launcher, *arguments], log, threads=1, more_environment=GIVE_BACK)
    if not case.shape:
        return resident * 2**20 / 1e9
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return float(max(record.get("peak_memory_gb", 0.0) for record in records))


def fixture_of(model: str, folder: Path) -> Path:
    """The fixture, built if it is not there by a process of its own: this one stays small."""
    fixture = folder / model / "fixture"
    build = ["-m", "experiments.evidence.bench.fixture", "--model", model, "--folder", str(fixture)]
    processes.run(build, folder / model / "fixture.log", threads=1)
    return fixture


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("output/bench"), help="with fixtures")
    args = parser.parse_args()
    print("| case | planned GB | in use GB | planned / in use | when |", flush=True)
    print("|" + " --- |" * 5, flush=True)
    is_off = False
    for name in args.cases:
        case, output_dir = CASES[name], args.folder / "plan" / name
        arguments = arguments_of(case, fixture_of(case.model, args.folder), output_dir)
        plan = planned(case, arguments, output_dir.with_suffix(".plan"))
        peak = measured(case, arguments, output_dir)
        ratio = float(plan["peak"]) / peak
        is_off = is_off or abs(ratio - 1) > GOAL
        cells = [name, plan["peak"], f"{peak:.3f}", f"{ratio:.2f}", plan["when"]]
        print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(is_off)


if __name__ == "__main__":
    main()
