"""Time to quality: the demo's chain by TRL and by the scripts, from the same weights and rows.

    make quality                                   # TRL's environment, seeds 0, 1 and 2
    make quality FLAGS="--seeds 0"                 # one of them: 20 minutes
    make quality FLAGS="--seeds 0 --max_steps 4"   # does it run?

For each seed both sides train SFT, then a reward model, DPO and GRPO from it, with the settings of
`assets/recipes/demo` as far as TRL has them, and no rejection sampling. `evaluate.py` judges both
on the same held-out pairs and posts. A stage's minutes are those of its command, start to end.

The same command on the same commit resumes; else, or with changed files, all is made anew. Writes
`results.json` and `table.md` to `output/bench/quality`. The two sides take turns by seed.
"""

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.record.environment import git_commit
from common.record.jsonl import write_atomically
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.evidence.bench import processes

if TYPE_CHECKING:
    from common.evaluation.results import System

SIDES = ("trl", "ours")
STAGES = ("sft", "reward", "dpo", "grpo")
WITH_STOP = "grpo, stop token"  # of TRL, whose reward model is given it as in its training
SAVE_STEPS = {"dpo": 10, "grpo": 6}
BEFORE = {"dpo": ("sft",), "grpo": ("sft", "reward")}  # what a stage that reaches `GOOD` needs
GOOD = 0.9  # gold reward
UNTIL = f"minutes to gold {GOOD}"
DIGITS = {"gold reward": 3, "accuracy, %": 1, "KL, nats": 2, "minutes": 2, "GB": 2, UNTIL: 2}
RECIPES = "assets/recipes/demo"
FOLDER = processes.REPOSITORY / "output" / "bench" / "quality"
RUNS = "runs.json"  # of a chain: minutes, memory and checkpoints of each stage
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TRL = ["-m", "assets.recipes.bench.trl_chain"]
# Over the recipes': nothing but the training, on the given rows from the given weights
FLAGS: dict[str, Any] = {"num_eval_rows": 0, "num_sample_prompts": 0, "keep_last": 0}
FLAGS |= {"dataset_test_split": "", "tokenizer_name_or_path": ""}


def main() -> None:
    """Run both chains of every seed, judge them, write the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=0, help="of each stage (0: the recipe's)")
    arguments = parser.parse_args()
    commit = git_commit() or "-dirty"
    made_by = json.dumps([commit, arguments.max_steps]) + "\n"
    for seed in arguments.seeds:
        start = FOLDER / f"seed_{seed}"
        mark = start / "made_by.json"
        is_same = mark.exists() and mark.read_text() == made_by
        if not is_same or commit.endswith("-dirty"):
            shutil.rmtree(start, ignore_errors=True)
            flags = [f"--config={RECIPES}/sft.yaml", f"--seed={seed}", f"--output_dir={start}"]
            processes.run([*TRL, "start", *flags], start / "start.log", threads=1)
            write_atomically(mark, [made_by])
        for side in SIDES:
            chain(side, start / side, seed, arguments.max_steps)
    results = {
        "seeds": arguments.seeds,
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "trl")},
        **{side: [judged(FOLDER / f"seed_{n}" / side) for n in arguments.seeds] for side in SIDES},
    }
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    (FOLDER / "table.md").write_text(text + "\n")
    print(text)


# ---- one chain -----------------------------------------------------------------------------------


def chain(side: str, folder: Path, seed: int, max_steps: int) -> None:
    """Train and judge the chain of a side, or what is left of it."""
    file, evaluation = folder / RUNS, folder / "evaluation"
    runs = json.loads(file.read_text()) if file.exists() else {}
    stages = [*STAGES, WITH_STOP] if side == "trl" else STAGES
    for stage in stages:
        if stage not in runs:
            words = command(side, stage, folder, seed, max_steps)
            runs[stage] = train([*LAUNCHER, *words], folder / stage)
            write_atomically(file, [json.dumps(runs) + "\n"])
    if not (evaluation / "results.json").exists():
        checkpoints = [path for stage in stages for path in runs[stage]["saved"]]
        policies = [f"{folder}/{stage}/model" for stage in stages if stage != "reward"]
        words = ["evaluate.py", f"--config={RECIPES}/evaluate.yaml"]
        words += [f"--output_dir={evaluation}", "--policies", *policies, *checkpoints]
        words += [f"--ref_model_name_or_path={policies[0]}"]
        words += [f"--reward_models={folder}/reward/model"]
        processes.run([*LAUNCHER, *words], folder / "evaluation.log", threads=1)


def command(side: str, stage: str, folder: Path, seed: int, max_steps: int) -> list[str]:
    """What trains a stage of a chain in its folder; TRL's side reads the flags of our script."""
    start, name = folder.parent, stage.partition(",")[0]
    flags = FLAGS | {
        "config": f"{RECIPES}/{name}.yaml",
        "seed": seed,
        "model_name_or_path": (start if name == "sft" else folder / "sft") / "model",
        "dataset_name": start / f"{name}.jsonl",
        "save_steps": SAVE_STEPS.get(name, 0),
        "output_dir": folder / stage,
    }
    if name == "grpo":
        reward_model = folder / "reward" / "model"
        flags |= {"reward_funcs": reward_model, "reward_weights": 1, "num_candidates": 0}
    if max_steps:
        flags["max_steps"] = max_steps
    words = [*TRL, name] if side == "trl" else [f"train_{name}.py"]
    words += ["--with_stop"] if stage == WITH_STOP else []
    return words + [f"--{flag}={value}" for flag, value in flags.items()]


def train(words: Sequence[str], output_dir: Path) -> dict[str, Any]:
    """Train a stage anew: minutes, memory of the larger process, minutes to each checkpoint."""
    shutil.rmtree(output_dir, ignore_errors=True)
    start = time.time()
    peak = processes.run(words, output_dir.with_suffix(".log"), threads=1)
    minutes = (time.time() - start) / 60
    saved = [*output_dir.glob("checkpoint-*"), *output_dir.glob("checkpoints/step_*")]
    ages = {str(path): (path.stat().st_mtime - start) / 60 for path in saved}
    return {"minutes": minutes, "GB": peak * 2**20 / 1e9, "saved": ages}


def judged(folder: Path) -> dict[str, dict[str, float]]:
    """The outcomes of a chain by stage."""
    # torch: the parent must stay smaller than its children, which have all ended
    from common.evaluation.results import read_results

    runs = json.loads((folder / RUNS).read_text())
    systems = read_results(folder / "evaluation" / "results.json").systems
    by_path = {system.path.removesuffix("/model"): system for system in systems}
    return {stage: outcomes(stage, folder, runs, by_path) for stage in runs}


def outcomes(
    stage: str, folder: Path, runs: Mapping[str, Any], systems: "Mapping[str, System]"
) -> dict[str, float]:
    """The outcomes of a stage."""
    system, values = systems[str(folder / stage)], dict(runs[stage])
    saved, name = values.pop("saved"), stage.partition(",")[0]
    if name == "reward":
        assert system.accuracy
        return values | {"accuracy, %": 100 * system.accuracy.accuracy}
    values["gold reward"] = gold(system)
    if name != "sft":
        assert system.generations
        assert system.generations.kl
        values["KL, nats"] = system.generations.kl.mean
    good = [at for path, at in saved.items() if gold(systems[path]) >= GOOD]
    if good:
        values[UNTIL] = min(good) + sum(runs[earlier]["minutes"] for earlier in BEFORE[name])
    return values


def gold(system: "System") -> float:
    """The mean gold reward of a policy."""
    assert system.gold_reward
    return system.gold_reward.mean


# ---- the table -----------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Both sides as means over seeds with Student's 95% interval, and their difference by seed."""
    rows = []
    for stage in (*STAGES, WITH_STOP):
        for name, digits in DIGITS.items():
            trl, ours = (
                [values.get(stage, {}).get(name) for values in results[side]] for side in SIDES
            )
            by_seed = [b - a for a, b in zip(trl, ours, strict=True) if None not in (a, b)]
            cells = [mean(trl, digits), mean(ours, digits), mean(by_seed, digits, sign="+")]
            if {*cells} != {NOT_MEASURED}:
                rows.append([stage, name, *cells])
    heads = ["stage", "", f"TRL {results['packages']['trl']}", "ours", "ours - TRL"]
    return markdown.table(heads, rows)


def mean(of_seeds: Sequence[float | None], digits: int, sign: str = "") -> str:
    """Mean and interval; and how many seeds they are of, if not all."""
    # torch: the parent must stay smaller than its children
    from experiments.runs.outcomes import over

    values = [value for value in of_seeds if value is not None]
    if not values:
        return NOT_MEASURED
    few = f" ({len(values)} of {len(of_seeds)} seeds)" if len(values) < len(of_seeds) else ""
    return over(values, digits, sign=sign) + few


if __name__ == "__main__":
    main()
