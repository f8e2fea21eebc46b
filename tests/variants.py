"""Every variant of every objective, trained on one process and on several: is it the same run?

    python -m tests.variants                             # 20 steps on 1 and 2 processes
    python -m tests.variants --steps 5 --ranks 1 2 4 --stages dpo reward
    python -m tests.variants --only num_iterations kl_  # whose flags have one of these texts

A variant is one value of a flag, on the embedded task with a GPT-2 of two layers that has learned
to stop. Printed as Markdown, one line per variant, each against the run on one process: the largest
relative difference of the loss (to 0.01 at least: on-policy it is 0 but for the KL) and of the
gradient norm over the steps, that of the final weights (norm of the difference over the norm), how
many sampled completions differ and since which step (with the difference of the losses before it),
and the Python warnings of all ranks.

A completion is a function of the seed and of log-probabilities that differ in their last digits
with the number of processes. Where a draw lies within that of a boundary, another token is drawn;
from then on it is another run, which the difference of its losses then measures.
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.losses import AGGREGATIONS
from common.noise import HEAD_STDS
from common.objectives.policy.sampler_weights import CORRECTIONS
from common.record.jsonl import read_jsonl
from common.text import synthetic
from tests.support.ranks import (
    SHORT_RUN,
    TINY_GPT2,
    Job,
    arguments,
    launch,
    run_and_listen,
    run_stages,
    with_paths,
)

Flags = dict[str, Any]
JOBS_PER_LAUNCH = 12
SMALLEST_LOSS = 0.01  # what a difference of losses is at least relative to
say = functools.partial(print, flush=True)

# Equal rewards in a third of the prompts, if all of a prompt's completions stop.
REWARD_FILE = """
def letters(prompts, completions, completion_ids, **columns):
    pairs = zip(prompts, completions)
    return [0.5 if len(p) % 3 == 0 else len(set(c)) / 10 for p, c in pairs]

def same(prompts, completions, completion_ids, **columns):
    return [1.0] * len(prompts)

def steps(prompts, completions, completion_ids, trainer_state, **columns):
    assert 0 <= trainer_state.global_step < trainer_state.max_steps
    return [[(i, token % 7 / 7) for i, token in enumerate(ids)] for ids in completion_ids]
"""

COMMON: Flags = SHORT_RUN | {
    "model_name_or_path": "BASE",
    "dataset_test_split": "",
    "num_train_rows": 22,  # in batches of 4: every sixth step has two rows of four
    "max_completion_length": 24,
    "lr_scheduler_type": "constant",
}
OF_STAGE: dict[str, Flags] = {
    "sft": {},
    "reward": {},
    "dpo": {},
    "grpo": {
        "max_completion_length": 8,
        "num_generations": 3,
        "missing_eos_penalty": -0.2,
        "reward_funcs": ["LETTERS"],
    },
}
OFF_POLICY: Flags = {"num_iterations": 2}  # the ratio leaves 1


def behind(name: str) -> Flags:
    """The clip, and a file that changes its loss."""
    return {"policy_objective": ["clip", name]}


MANY: Flags = {"num_candidates": 5}
LORA: Flags = {"lora_r": 4, "learning_rate": 1e-2}
FURTHER_LORA: list[Flags] = [LORA, {**LORA, "lora_alpha": 8, "lora_target_modules": ["c_attn"]}]

VARIANTS: dict[str, list[Flags]] = {
    "sft": [{}, *FURTHER_LORA],
    "reward": [
        {},
        *({"head_init": name} for name in HEAD_STDS if name != "stiennon"),
        {"center_rewards_coefficient": 0.1},
        {"sft_dataset_name": "synthetic", "num_sft_rows": 9},
        {"dataset_name": "COMPARISONS", "margin_column": "margin"},
        *FURTHER_LORA,
    ],
    "dpo": [
        {},
        {"loss_type": ["sigmoid:label_smoothing=0.1"]},
        {"loss_type": ["sigmoid_norm"], "beta": 2.0},
        {"loss_type": ["robust:label_smoothing=0.1"]},
        {"loss_type": ["ipo"]},
        {"loss_type": ["ipo_mean"], "beta": 2.0},
        {"loss_type": ["hinge"]},
        {"loss_type": ["simpo:gamma=0.5"], "beta": 2.0},
        {"loss_type": ["sigmoid", "ipo", "hinge"], "loss_weights": [1.0, 0.02, 0.5]},
        {"reference_free": True},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        {"ref_model_name_or_path": "OTHER"},
        *FURTHER_LORA,
    ],
    "grpo": [
        {},
        {"beta": 0.0},
        OFF_POLICY,
        {"num_minibatches": 2},
        {**OFF_POLICY, "num_minibatches": 2},
        {**OFF_POLICY, "policy_objective": "cispo:epsilon_high=0.01"},
        {**OFF_POLICY, "policy_objective": "sapo"},
        {**OFF_POLICY, "policy_objective": "sapo:tau_pos=5"},
        {**OFF_POLICY, "policy_objective": "sapo:tau_neg=5"},
        {**OFF_POLICY, "policy_objective": "dppo:epsilon_low=1e-3,epsilon_high=1e-3"},
        {**OFF_POLICY, **behind("off_policy_mask:threshold=1e-3")},
        {**OFF_POLICY, **behind("sampler_drift:coef=0.1")},
        {**OFF_POLICY, "policy_objective": "gspo:epsilon_low=0.01,epsilon_high=0.2"},
        {**OFF_POLICY, "policy_objective": "clip:epsilon_low=0.01,epsilon_high=0.02"},
        {**OFF_POLICY, "policy_objective": "clip:epsilon_high=0.01,delta=1.02"},
        *({"aggregation": name} for name in AGGREGATIONS if name != "grpo"),
        {"advantages": "batch"},
        {"advantages": "none"},
        {"advantages": "mean", "missing_eos_penalty": 0.0},
        {"advantages": "rloo:scale=group"},
        {"penalize_missing_eos": False},
        {"normalize_globally": True},
        {"kl_estimator": "k2"},
        {"kl_estimator": "full"},
        {**OFF_POLICY, "kl_estimator": "k1_ratio"},
        {**OFF_POLICY, "kl_estimator": "k3_ratio"},
        {"kl_estimator": "k1_reward"},
        {"entropy_coef": 0.05},
        {"zero_variance": "drop"},
        {"zero_variance": "resample"},
        {"mask_truncated_completions": True},
        {"reward_funcs": ["LETTERS", "overlong:2-8"]},
        *(behind(f"sampler_weights:correction={name}") for name in CORRECTIONS),
        behind("geometric_mask"),
        behind("sampler_weights:correction=token_mask,cap=1.5"),
        behind("geometric_mask:low=0.99"),
        MANY,
        {**MANY, "baseline": "kept", "rejection_temperature": 0.2},
        {**MANY, "rejection_method": "gumbel"},
        {**MANY, "rejection_method": "rso_distinct"},
        {**MANY, "rejection_method": "gumbel_distinct"},
        {**MANY, "rejection_method": "max_variance"},
        {"reward_funcs": ["STEPS"]},
        {"reward_funcs": ["LETTERS", "gold"], "reward_weights": [0.5, 1.0]},
        {
            "reward_funcs": ["LETTERS", "gold"],
            "reward_weights": [0.5, 1.0],
            "advantages": "gdpo",
        },
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.9},
        {"ref_model_name_or_path": "OTHER"},
        {"ref_update_steps": 2},
        {"ref_update_steps": 2, "ref_mixup_alpha": 0.6},
        {
            "eval_pairs_dataset_name": "synthetic",
            "dataset_test_split": "validation",
            "eval_steps": 2,
            "max_dropped_fraction": 0.2,  # cut to 8 tokens some pairs are identical
        },
        *FURTHER_LORA,
    ],
}


# ---- what the runs start from --------------------------------------------------------------------


def stopping_model_job(
    folder: Path, model_config: Path, tokenizer_folder: Path, seed: int = 0
) -> Job:
    """A run that leaves `folder/model`, which stops after some words: it is trained on beginnings.

    Args:
        folder: gets the rows and the run.
        model_config: .json of the model's shape.
        tokenizer_folder: of the embedded task.
        seed: of its random weights.
    """
    folder.mkdir()
    with (folder / "short.jsonl").open("w") as file:
        for i, row in enumerate(synthetic.make_rows("sft", "train", 64)):
            words = row["completion"].split()[: 1 + i % 4]
            file.write(json.dumps({"prompt": row["prompt"], "completion": " ".join(words)}) + "\n")
    flags = COMMON | {
        "dataset_name": str(folder / "short.jsonl"),
        "num_train_rows": 64,
        "max_completion_length": 8,
        "model_name_or_path": str(model_config),
        "tokenizer_name_or_path": str(tokenizer_folder),
        "output_dir": str(folder),
        "batch_size": 16,
        "learning_rate": 1e-2,
        "max_steps": 40,
        "seed": seed,
    }
    return {"stage": "sft", "flags": flags}


def write_comparisons(path: Path) -> None:
    """Three comparisons of three summaries for each post, with margins."""
    with path.open("w") as file:
        for row in synthetic.make_rows("preference", "train", 22):
            best, second = row["chosen"], row["rejected"]
            third = " " + " ".join(second.split()[:3])
            for i, pair in enumerate(((best, second), (best, third), (second, third))):
                texts = dict(zip(("chosen", "rejected"), pair, strict=True))
                file.write(json.dumps({"prompt": row["prompt"], **texts, "margin": 0.1 * i}) + "\n")


def start(folder: Path) -> dict[str, str]:
    """Make the files that all variants need; the paths behind the capital names in their flags."""
    model_config = folder / "tiny.json"
    model_config.write_text(json.dumps(TINY_GPT2))
    tokenizer = folder / "tokenizer"
    synthetic.train_tokenizer().save_pretrained(tokenizer)  # reading it is quicker than this
    bases = {name: folder / name.lower() for name in ("BASE", "OTHER")}
    jobs = [
        stopping_model_job(path, model_config, tokenizer, seed)
        for seed, path in enumerate(bases.values())
    ]
    launch(run_stages, 1, folder, jobs=jobs)
    (folder / "rewards.py").write_text(REWARD_FILE)
    write_comparisons(folder / "comparisons.jsonl")
    return {
        **{name: str(path / "model") for name, path in bases.items()},
        "LETTERS": f"{folder}/rewards.py:letters",
        "STEPS": f"{folder}/rewards.py:steps",
        "COMPARISONS": str(folder / "comparisons.jsonl"),
    }


# ---- runs and their comparison -------------------------------------------------------------------


@dataclass
class Run:
    """A variant on some number of ranks."""

    lines: list[dict[str, Any]]  # of metrics.jsonl
    weights: dict[str, torch.Tensor]
    rollouts: dict[str, list[list[int]]]  # completions of a prompt by "step S, row R"
    warnings: list[str]  # of all ranks


@dataclass
class Comparison:
    """Differences between two runs."""

    loss: float
    grad_norm: float
    weights: float
    num_drawn: int
    num_other: int  # completions that differ
    first_step: int | None  # with such a completion
    loss_before: float  # difference of the losses of the steps before it


def job_of(
    stage: str, flags: Flags, output_dir: Path, num_steps: int, paths: dict[str, str]
) -> Job:
    filled = COMMON | OF_STAGE[stage] | {"max_steps": num_steps} | flags
    return {"stage": stage, "flags": with_paths(filled, paths) | {"output_dir": str(output_dir)}}


def run_variants(jobs: Sequence[Job], num_ranks: int, folder: Path) -> list[Run]:
    limits = {"micro_batch_size": 2} if num_ranks > 1 else {}  # cut as small as one rank's are not
    jobs = [{**job, "flags": limits | job["flags"]} for job in jobs]
    by_rank = launch(run_and_listen, num_ranks, folder, timeout=1200, jobs=jobs)
    runs = []
    for job, records in zip(jobs, zip(*by_rank, strict=True), strict=True):
        output_dir = Path(job["flags"]["output_dir"])
        rollouts = {key: ids for record in records for key, ids in record["rollouts"].items()}
        heard = [message for record in records for message in record["warnings"]]
        weights = load_file(output_dir / "model" / "model.safetensors")
        weights.pop("lm_head.weight", None)  # tied: several ranks write it a second time
        runs.append(Run(read_jsonl(output_dir / "metrics.jsonl"), weights, rollouts, heard))
    return runs


def largest_difference(
    one: Run, other: Run, metric: str, floor: float = 0.0, num_steps: int | None = None
) -> float:
    """Of a metric over the lines that have it, relative to the first run's value or to `floor`.

    Only the first `num_steps` count, if they are given.
    """
    lines = [[line for line in run.lines if metric in line] for run in (one, other)]
    pairs = [(a[metric], b[metric]) for a, b in list(zip(*lines, strict=True))[:num_steps]]
    return max((abs(a - b) / max(abs(a), floor, 1e-30) for a, b in pairs), default=0.0)


def compare(one: Run, other: Run) -> Comparison:
    assert one.weights.keys() == other.weights.keys()
    gaps = [(one.weights[name] - other.weights[name]).norm() for name in one.weights]
    norms = [tensor.norm() for tensor in one.weights.values()]
    num_other: dict[int, int] = {}  # by step
    for key, completions in one.rollouts.items():
        step = int(key.split(",")[0].removeprefix("step "))
        theirs = other.rollouts.get(key, [[]] * len(completions))
        unlike = sum(a != b for a, b in zip(completions, theirs, strict=True))
        num_other[step] = num_other.get(step, 0) + unlike
    first_step = min((step for step, number in num_other.items() if number), default=None)
    return Comparison(
        loss=largest_difference(one, other, "loss", SMALLEST_LOSS),
        grad_norm=largest_difference(one, other, "grad_norm", 1e-6),
        weights=float(torch.stack(gaps).norm() / torch.stack(norms).norm()),
        num_drawn=sum(map(len, one.rollouts.values())),
        num_other=sum(num_other.values()),
        first_step=first_step,
        loss_before=largest_difference(one, other, "loss", SMALLEST_LOSS, first_step),
    )


# ---- the table -----------------------------------------------------------------------------------


def label(stage: str, flags: Flags) -> str:
    typed = {k: v if isinstance(v, list) else str(v).lower() for k, v in flags.items()}
    return f"`{' '.join([stage, *arguments(typed)])}`"


def row(name: str, num_ranks: int, one: Run, other: Run) -> str:
    difference = compare(one, other)
    sampled = f"{difference.num_other} of {difference.num_drawn}" if difference.num_drawn else "-"
    if difference.first_step is not None:
        sampled += f", from step {difference.first_step + 1} (before: {difference.loss_before:.1e})"
    numbers = [f"{v:.1e}" for v in (difference.loss, difference.grad_norm, difference.weights)]
    num_warnings = len(one.warnings) + len(other.warnings)
    return f"| {' | '.join([name, f'1, {num_ranks}', *numbers, sampled, str(num_warnings)])} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--only", nargs="+", default=[""], help="texts to look for in the flags")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as unkept:
        folder = (options.folder or Path(unkept)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        chosen = [
            (stage, flags)
            for stage in options.stages
            for flags in VARIANTS[stage]
            if any(text in label(stage, flags) for text in options.only)
        ]
        print_table(folder, chosen, options.steps, options.ranks)


def print_table(
    folder: Path, chosen: Sequence[tuple[str, Flags]], num_steps: int, ranks: Sequence[int]
) -> None:
    """Run variants, each a stage with its flags; print a line for each as soon as it is known."""
    paths = start(folder)
    names = ("loss", "gradient norm", "weights", "other completions", "warnings")
    say(f"| variant | processes | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    heard: list[str] = []
    for first in range(0, len(chosen), JOBS_PER_LAUNCH):
        chunk = chosen[first : first + JOBS_PER_LAUNCH]
        runs = {}
        for num_ranks in dict.fromkeys([1, *ranks]):
            jobs = [
                job_of(stage, flags, folder / str(num_ranks) / str(first + i), num_steps, paths)
                for i, (stage, flags) in enumerate(chunk)
            ]
            runs[num_ranks] = run_variants(jobs, num_ranks, folder)
            heard += [message for run in runs[num_ranks] for message in run.warnings]
        for i, (stage, flags) in enumerate(chunk):
            for num_ranks in list(runs)[1:]:
                say(row(label(stage, flags), num_ranks, runs[1][i], runs[num_ranks][i]))
    for message in dict.fromkeys(heard):
        say(f"\nwarning: {message}")


if __name__ == "__main__":
    main()
