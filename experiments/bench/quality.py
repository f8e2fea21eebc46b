"""Time to quality: the demo's chain by TRL and by the scripts, from the same weights and rows.

    make quality                                   # TRL's environment, seeds 0, 1 and 2
    python -m experiments.bench.quality --seeds 0 --max_steps 4    # does it run?

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
from typing import Any

from common.record.jsonl import write_atomically
from common.record.run_folder import git_commit
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.bench import processes

SIDES = ("trl", "ours")
STAGES = ("sft", "reward", "dpo", "grpo")
WITH_STOP = "grpo, stop token"  # of TRL, whose reward model is given it as in its training
SAVE_STEPS = {"dpo": 10, "grpo": 6, WITH_STOP: 6}
GOOD = 0.9  # gold reward
RECIPES = "assets/recipes/demo"
FOLDER = processes.REPOSITORY / "output" / "bench" / "quality"
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
DIGITS = {"gold reward": 3, "accuracy, %": 1, "KL, nats": 2, "minutes": 2, "GB": 2}
UNTIL = f"minutes to gold {GOOD}"
# What a side needs before the stage that reaches it
BEFORE = {"dpo": ("sft",), "grpo": ("sft", "reward"), WITH_STOP: ("sft", "reward")}

Values = dict[str, dict[str, float]]  # of a chain, by stage and outcome


def main() -> None:
    """Run both chains of every seed, judge them, write the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=0, help="of each stage (0: the recipe's)")
    arguments = parser.parse_args()
    found: dict[str, list[Values]] = {side: [] for side in SIDES}
    for seed in arguments.seeds:
        start = FOLDER / f"seed_{seed}"
        mark, commit = start / "made_by.json", git_commit() or ""
        made_by, is_known = [commit, arguments.max_steps], not commit.endswith("-dirty")
        if not (is_known and mark.exists() and json.loads(mark.read_text()) == made_by):
            shutil.rmtree(start, ignore_errors=True)
            flags = [f"--seed={seed}", f"--output_dir={start}"]
            module = "experiments.bench.trl_chain"
            processes.run(["-m", module, "start", *flags], start / "start.log", threads=1)
            write_atomically(mark, [json.dumps(made_by) + "\n"])
        for side in SIDES:
            found[side].append(chain(side, start / side, seed, arguments.max_steps))
    results = {
        "seeds": arguments.seeds,
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "trl")},
        **found,
    }
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    (FOLDER / "table.md").write_text(text + "\n")
    print(text)


# ---- one chain -----------------------------------------------------------------------------------


def chain(side: str, folder: Path, seed: int, max_steps: int) -> Values:
    """Train and judge the chain of a side, or what is left of it; its outcomes by stage."""
    file, judgement = folder / "runs.json", folder / "evaluation" / "results.json"
    runs = json.loads(file.read_text()) if file.exists() else {}
    stages = [*STAGES, WITH_STOP] if side == "trl" else STAGES
    for stage in stages:
        if stage not in runs:
            words = command(side, stage, folder, seed, max_steps)
            runs[stage] = train([*LAUNCHER, *words], folder / stage)
            write_atomically(file, [json.dumps(runs) + "\n"])
    if not judgement.exists():
        checkpoints = [path for stage in stages for path in runs[stage]["saved"]]
        policies = [str(folder / stage / "model") for stage in stages if stage != "reward"]
        words = ["evaluate.py", "--config", f"{RECIPES}/evaluate.yaml"]
        words += ["--output_dir", str(folder / "evaluation"), "--policies", *policies, *checkpoints]
        words += ["--ref_model_name_or_path", policies[0]]
        words += ["--reward_models", str(folder / "reward" / "model")]
        processes.run([*LAUNCHER, *words], folder / "evaluation.log", threads=1)
    systems = json.loads(judgement.read_text())["systems"]
    # Of a checkpoint of ours the folder `model` in it is judged
    judged = {str(Path(system["path"]).parent): system for system in systems}
    judged |= {system["path"]: system for system in systems}
    return {stage: outcomes(stage, folder, runs, judged) for stage in stages}


def command(side: str, stage: str, folder: Path, seed: int, max_steps: int) -> list[str]:
    """What trains a stage of a chain in its folder."""
    start, name = folder.parent, stage.partition(",")[0]
    model = folder / "sft" / "model" if stage != "sft" else start / "model"
    rows, reward_model = start / f"{name}.jsonl", folder / "reward" / "model"
    flags: dict[str, Any] = {"seed": seed, "output_dir": folder / stage}
    flags["save_steps"] = SAVE_STEPS.get(stage, 0)
    if max_steps:
        flags["max_steps"] = max_steps
    if side == "trl":
        script = ["-m", "experiments.bench.trl_chain", name]
        script += ["--with_stop"] if stage == WITH_STOP else []
        flags |= {"model": model, "rows": rows, "reward_model": reward_model}
    else:
        script = [f"train_{stage}.py", "--config", f"{RECIPES}/{stage}.yaml"]
        flags |= {"model_name_or_path": model, "dataset_name": rows, "dataset_test_split": ""}
        flags |= {"num_sample_prompts": 0, "keep_last": 0, "num_eval_rows": 0}
        if stage == "sft":
            flags["tokenizer_name_or_path"] = ""
        if stage == "grpo":
            flags |= {"reward_funcs": reward_model, "reward_weights": 1, "num_candidates": 0}
    return [*script, *(f"--{name}={value}" for name, value in flags.items())]


def train(words: Sequence[str], output_dir: Path) -> dict[str, Any]:
    """Train a stage anew: minutes, memory of the larger process, minutes to each checkpoint."""
    shutil.rmtree(output_dir, ignore_errors=True)
    start = time.time()
    peak = processes.run(words, output_dir.with_suffix(".log"), threads=1)
    minutes = (time.time() - start) / 60
    saved = [*output_dir.glob("checkpoint-*"), *output_dir.glob("checkpoints/step_*")]
    ages = {str(path): (path.stat().st_mtime - start) / 60 for path in saved}
    return {"minutes": minutes, "GB": peak * 2**20 / 1e9, "saved": ages}


def outcomes(
    stage: str, folder: Path, runs: Mapping[str, Any], judged: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """The outcomes of a stage."""
    own, found = judged[str(folder / stage / "model")], dict(runs[stage])
    saved = found.pop("saved")
    if stage == "reward":
        return {**found, "accuracy, %": 100 * own["accuracy"]["accuracy"]}
    found["gold reward"] = own["rewards"]["gold"]["mean"]
    if stage == "sft":
        return found
    good = [at for path, at in saved.items() if judged[path]["rewards"]["gold"]["mean"] >= GOOD]
    if good:
        found[UNTIL] = min(good) + sum(runs[earlier]["minutes"] for earlier in BEFORE[stage])
    return {**found, "KL, nats": own["kl"]["mean"]}


# ---- the table -----------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Both sides as means over seeds with Student's 95% interval, and their difference by seed."""
    rows = []
    for stage in (*STAGES, WITH_STOP):
        for name in [*DIGITS, UNTIL]:
            sides = [[own.get(stage, {}).get(name) for own in results[side]] for side in SIDES]
            if any(value is not None for values in sides for value in values):
                digits = DIGITS.get(name, 2)
                known = [[value for value in values if value is not None] for values in sides]
                cells = [mean(values, len(results["seeds"]), digits) for values in known]
                by_seed = [b - a for a, b in zip(*sides, strict=True) if None not in (a, b)]
                rows.append([stage, name, *cells, mean(by_seed, len(by_seed), digits, sign="+")])
    heads = ["stage", "", f"TRL {results['packages']['trl']}", "ours", "ours - TRL"]
    return markdown.table(heads, rows)


def mean(values: Sequence[float], num_seeds: int, digits: int, sign: str = "") -> str:
    """Mean and interval; and how many seeds they are of, if not all."""
    from experiments.outcomes import over  # torch: not in `processes`' parent

    if not values:
        return NOT_MEASURED
    few = f" ({len(values)} of {num_seeds} seeds)" if len(values) < num_seeds else ""
    return over(values, digits, sign=sign) + few


if __name__ == "__main__":
    main()
