"""Golden trajectories: the first steps of every stage, recorded in `golden/`, one file per stage.

    python -m tests.trajectories                    # run them anew, print and write what changed
    python -m tests.trajectories --code output/old  # compare only, with the scripts of another tree

Every case starts from weights that are hashes of counters, the same bits on every machine. A case
of GRPO is run with other seeds, so other prompts, until every draw is at least `MARGIN` from
another token: rounding cannot change a completion. A version of a stage's trajectories is a hash
of its file's numbers; the records of `assets/results` name the versions they were made under.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common import noise
from common.record.environment import cpu_model
from common.record.jsonl import read_jsonl
from common.sampling import decode
from common.text import synthetic
from tests.support import ranks
from tests.support.ranks import (
    ROOT,
    SHORT_RUN,
    STAGES,
    TINY_GPT2,
    Job,
    arguments,
    launch,
    run_script,
    run_stages,
    with_paths,
)
from tests.tolerances import SETTINGS
from tests.variants import REWARD_FILE

GOLDEN = ROOT / "tests" / "golden"
STEPS, MARGIN = 5, 1e-4
SAME_MACHINE, OTHER_MACHINE = 1e-5, 1e-4  # relative, see `change_of`
SMALLEST = 0.01  # what a change is at least relative to: a loss may be 0 but for its KL
METRICS = {
    "sft": ("loss", "grad_norm", "learning_rate", "tokens"),
    "reward": ("loss", "grad_norm", "accuracy", "reward_margin"),
    "dpo": ("loss", "grad_norm", "accuracy", "reward_margin"),
    "grpo": ("loss", "grad_norm", "reward", "kl"),
}
COMMON: dict[str, Any] = SHORT_RUN | {
    "model_name_or_path": "BASE",
    "dataset_test_split": "",
    "num_train_rows": 18,  # the last batch of an epoch has 2 rows of 4
    "max_completion_length": 24,
    "micro_batch_size": 2,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_steps": STEPS,
}
OF_STAGE: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {},
    "dpo": {"ref_model_name_or_path": "OTHER"},  # at its own reference all margins would be equal
    "grpo": {
        "ref_model_name_or_path": "OTHER",
        "max_completion_length": 8,
        "batch_size": 2,
        "num_generations": 3,
        "missing_eos_penalty": -0.2,
        "reward_funcs": ["LETTERS"],
    },
}
CASES: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {},
        {"layout": "padded"},
        {"lora_r": 4, "learning_rate": 1e-2},
        {"bf16": True},
        {"num_processes": 2},
    ],
    "reward": [{}, {"layout": "padded"}],
    "dpo": [{}, {"layout": "padded"}, {"loss_type": ["ipo"]}, {"bf16": True}],
    "grpo": [
        {},
        {"layout": "padded"},
        {"num_iterations": 2, "num_minibatches": 2},
        {
            "num_candidates": 5,
            "rejection_method": "gumbel",
            "baseline": "kept",
            "normalize_globally": True,
        },
        {"num_candidates": 5, "normalize_globally": True},
        {"reward_funcs": ["STEPS"]},
        {"kl_estimator": "full"},
        {"ref_update_steps": 2},
        {"num_processes": 2},
    ],
}
Key = tuple[str, dict[str, Any], int]  # stage, flags, seed
Numbers = dict[str, list[float]]  # of each metric, one per step
Outcome = tuple[Numbers, float]  # with the smallest distance of a draw from another token
Change = tuple[float, str]  # as a share of what rounding may be, and where
Case = dict[str, Any]  # "seed", "machine", "tolerance" by metric, and the Numbers


def label(stage: str, flags: dict[str, Any]) -> str:
    return " ".join([stage, *arguments(flags)])


def write_model(folder: Path, tokenizer: Any, seed: int) -> None:
    """Write a GPT-2 of hashed weights, which ends a completion with one token in about five."""
    stop = tokenizer.eos_token_id
    shape = {name: value for name, value in TINY_GPT2.items() if name != "architectures"}
    lm = GPT2LMHeadModel(
        GPT2Config(**shape, vocab_size=len(tokenizer), bos_token_id=stop, eos_token_id=stop)
    )
    with torch.no_grad():
        for i, parameter in enumerate(lm.parameters()):
            numbers = 2 * noise.uniform(seed, i, torch.arange(parameter.numel())) - 1
            is_scale = parameter.dim() == 1 and bool((parameter == 1).all())  # of a layer norm
            parameter.copy_(0.3 * numbers.view_as(parameter) + is_scale)
        direction = lm.transformer.wte.weight[stop]
        lm.transformer.ln_f.bias.copy_(5.0 * direction / direction.square().sum())
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_inputs(folder: Path) -> dict[str, str]:
    """Write what the cases start from: the paths behind the capital names in their flags."""
    tokenizer = synthetic.train_tokenizer()
    for seed, name in enumerate(("BASE", "OTHER")):
        write_model(folder / name, tokenizer, seed)
    (folder / "rewards.py").write_text(REWARD_FILE)
    functions = {name.upper(): f"{folder}/rewards.py:{name}" for name in ("letters", "steps")}
    return {"BASE": str(folder / "BASE"), "OTHER": str(folder / "OTHER"), **functions}


def job_of(stage: str, flags: dict[str, Any], seed: int, paths: dict[str, str], out: Path) -> Job:
    """A case as a run in a folder."""
    filled = COMMON | OF_STAGE[stage] | flags | {"seed": seed, "output_dir": str(out)}
    filled.pop("num_processes", None)
    return {"stage": stage, "flags": with_paths(filled, paths)}


def run_cases(cases: Sequence[Key], folder: Path, code: Path = ROOT) -> list[Outcome]:
    """Run cases (stage, flags, seed) with the scripts of a tree; their outcomes.

    The distance is measured with this tree's scripts only.
    """
    paths = write_inputs(folder)
    jobs = [job_of(*case, paths, folder / f"{i}") for i, case in enumerate(cases)]
    distances = [1.0 for _ in cases]
    for num_processes in (1, 2):
        chosen = [i for i, case in enumerate(cases) if processes(case[1]) == num_processes]
        if code == ROOT:
            ours = [jobs[i] for i in chosen]
            by_rank = launch(run_and_measure, num_processes, folder, jobs=ours)
            for i, *measured in zip(chosen, *by_rank, strict=True):
                distances[i] = min(measured)
            continue
        for i in chosen:
            script = f"{STAGES[jobs[i]['stage']][0]}.py"
            run_script([script, *arguments(jobs[i]["flags"])], num_processes, folder=code)
    return [(numbers_of(job), distance) for job, distance in zip(jobs, distances, strict=True)]


def processes(flags: dict[str, Any]) -> int:
    return int(flags.get("num_processes", 1))


def run_and_measure(jobs: Sequence[Job]) -> list[float]:
    """`run_stages` on this rank; the smallest distance of a draw from another token, by job."""
    by_weights, margins = decode.by_weights, [1.0 for _ in jobs]
    for i, job in enumerate(jobs):

        def measured(weights: torch.Tensor, uniforms: torch.Tensor, i: int = i) -> torch.Tensor:
            cumulative = weights.double().cumsum(-1)
            inner = (cumulative / cumulative[:, -1:])[:, :-1]  # the last one ends at 1
            distance = (inner - uniforms.unsqueeze(-1)).abs().min()
            margins[i] = min(margins[i], float(distance))
            return by_weights(weights, uniforms)

        with mock.patch.object(decode, "by_weights", measured):
            run_stages([job])
    return margins


def numbers_of(job: Job) -> Numbers:
    lines = read_jsonl(Path(job["flags"]["output_dir"]) / "metrics.jsonl")[:STEPS]
    return {name: [line[name] for line in lines] for name in METRICS[job["stage"]]}


def change_of(metric: str, numbers: Numbers, golden: Case) -> tuple[float, str]:
    """The largest change of a metric, relative to its largest value, and where it is."""
    scale = max(SMALLEST, *map(abs, golden[metric]))
    return max(
        (abs(value - before) / scale, f"{metric} of step {step}: {before:.8g} became {value:.8g}")
        for step, (before, value) in enumerate(zip(golden[metric], numbers[metric], strict=True), 1)
    )


def compare(metrics: Sequence[str], numbers: Numbers, golden: Case) -> Change:
    """The change of a case that is largest for what rounding may be, on this machine."""
    rounding = SAME_MACHINE if golden["machine"] == machine() else OTHER_MACHINE
    changes = []
    for metric in metrics:
        change, where = change_of(metric, numbers, golden)
        allowed = max(rounding, golden["tolerance"].get(metric, 0.0))
        changes.append((change / allowed, f"{where}, {change:.1e} of {allowed:.1e}"))
    return max(changes)


def machine() -> dict[str, str]:
    """Properties of this machine that rounding depends on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu_model(), "instructions": capability, "torch": torch.__version__}


def read(stage: str) -> dict[str, Case]:
    """The golden cases of a stage; none where there is no file."""
    file = GOLDEN / f"{stage}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def tolerances(key: Key, numbers: Numbers) -> dict[str, float]:
    """Of each metric twice the largest change that other instructions of the CPU make."""
    largest = dict.fromkeys(numbers, 0.0)
    for name, libraries in SETTINGS.items():
        ranks.end_servers()  # those that start now import torch with the other instructions
        instructions = {"ATEN_CPU_CAPABILITY": name, **libraries}
        with mock.patch.dict(os.environ, instructions), tempfile.TemporaryDirectory() as folder:
            ((others, _),) = run_cases([key], Path(folder))
        for metric in numbers:
            change, _ = change_of(metric, others, numbers)
            largest[metric] = max(largest[metric], 2 * change)
    ranks.end_servers()
    return largest


def record(stage: str) -> None:
    """Write the golden file of a stage, and print what changed since it was written."""
    before, cases = read(stage), {}
    for seed in count():
        left = [flags for flags in CASES[stage] if label(stage, flags) not in cases]
        if not left:
            break
        keys = [(stage, flags, seed) for flags in left]
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_cases(keys, Path(folder))
        for key, (numbers, distance) in zip(keys, outcomes, strict=True):
            if distance >= MARGIN:
                allowed = tolerances(key, numbers) if "bf16" in key[1] else {}
                head = {"seed": seed, "machine": machine(), "tolerance": allowed}
                cases[label(*key[:2])] = head | numbers
    for name, case in cases.items():
        golden = before.get(name)
        if golden is None or golden["seed"] != case["seed"]:
            print(f"{name}: new")
            continue
        share, where = compare(METRICS[stage], case, golden)
        if share <= 1:
            cases[name] = golden
        print(f"{name}: {'as before' if share <= 1 else 'changed'}; {where}")
    if cases != before:
        GOLDEN.mkdir(exist_ok=True)
        ordered = {name: cases[name] for name in (label(stage, flags) for flags in CASES[stage])}
        (GOLDEN / f"{stage}.json").write_text(json.dumps(ordered, indent=1) + "\n")


def changes(stages: Sequence[str], folder: Path, code: Path = ROOT) -> dict[str, Change]:
    """Changes of the golden cases against their files when the scripts of a tree run them."""
    named = {label(stage, flags): (stage, flags) for stage in stages for flags in CASES[stage]}
    golden = {name: case for stage in stages for name, case in read(stage).items()}
    keys = [(*named[name], case["seed"]) for name, case in golden.items()]
    both = zip(golden.items(), run_cases(keys, folder, code), strict=True)
    return {
        name: compare(METRICS[named[name][0]], numbers, case) for (name, case), (numbers, _) in both
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--stages", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--code", type=Path, help="the root of another tree: only compare")
    options = parser.parse_args()
    if options.code is None:
        for stage in options.stages:
            record(stage)
        return
    with tempfile.TemporaryDirectory() as folder:
        compared = changes(options.stages, Path(folder), options.code.resolve())
    for name, (_, where) in compared.items():
        print(f"{name}: {where}")


if __name__ == "__main__":
    from tests import trajectories  # by the name under which the ranks find its function

    trajectories.main()
