"""Kill runs at random moments, start them again, and compare with one that was left alone.

    python -m tests.fault_drill --kills 50

Every stage runs on 1 and on 2 ranks, plain and with what a checkpoint must hold besides (`CASES`):
once in one go, and once killed again and again, each time restarted with the same command. SIGKILL
goes to all processes of the run or to one rank; at times a SIGTERM asks the run to stop. Killed
runs must end with the same lines of metrics (timings aside) and samples, the same exported weights
and the same last checkpoint, optimiser state included, to the bit; a case in which one does not, or
which fails, is a row in bold type, and the exit status is 1.
`tests/checkpoint/test_resume.py` has the short form.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.ranks import ROOT, TINY_GPT2, Script, launch, of_stage, run_stages, untimed_lines

STEPS = 12
COMMON = {
    "num_train_rows": 60,
    "num_eval_rows": 6,
    "num_sample_prompts": 2,
    "max_prompt_length": 128,
    "max_completion_length": 24,
    "batch_size": 8,
    "micro_batch_size": 3,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "max_steps": STEPS,
    "logging_steps": 3,  # checkpoints stand between two lines of metrics as well
    "eval_steps": 4,
    "sample_steps": 6,
    "save_steps": 1,
    "keep_last": 2,
}
OF_STAGE: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {"sft_dataset_name": "synthetic", "num_sft_rows": 16},
    "dpo": {},
    "grpo": {
        "eval_pairs_dataset_name": "synthetic",
        "num_candidates": 6,
        "num_generations": 4,
        "reward_funcs": "gold",
        "missing_eos_penalty": -0.2,
        "beta": 0.05,
    },
}


@dataclass(frozen=True)
class Case:
    """A stage on some ranks, with flags over those of its stage."""

    stage: str
    num_ranks: int = 1
    flags: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        flags = [f"--{name} {value}" for name, value in self.flags.items()]
        return f"`{' '.join([self.stage, *flags])}`"


LORA, BF16, OFFLOAD = {"lora_r": 4}, {"bf16": "true"}, {"cpu_offload": "true"}
MOVING = {"ref_update_steps": 4}
SEVERAL = {"num_iterations": 2, "num_minibatches": 2}  # four updates of a rollout
CASES = (
    *(Case(stage, num_ranks) for stage in OF_STAGE for num_ranks in (1, 2)),
    Case("sft", 1, OFFLOAD),
    Case("sft", 2, BF16 | OFFLOAD),
    Case("reward", 2, LORA),
    Case("dpo", 1, LORA),
    Case("dpo", 2, BF16 | {"offload_frozen": "true"}),
    Case("grpo", 1, SEVERAL),
    Case("grpo", 2, SEVERAL | MOVING | {"ref_mixup_alpha": 0.6}),
    Case("grpo", 2, LORA | MOVING),
)


@dataclass
class Tally:
    """Counts of events in the runs of a case."""

    kills: int = 0
    stops: int = 0  # by SIGTERM
    while_saving: int = 0
    early: int = 0  # before a new checkpoint had to be there
    restarts: int = 0
    lost_steps: int = 0
    runs: int = 0
    identical: int = 0
    wrong: list[str] = field(default_factory=list)  # what differs, and where; how it failed


def flags_of(case: Case, folder: Path, output_dir: Path) -> dict[str, Any]:
    flags = of_stage(case.stage, COMMON | OF_STAGE[case.stage] | case.flags)
    flags |= {
        "model_name_or_path": str(folder / "gpt2.json"),
        "tokenizer_name_or_path": str(folder / "tokenizer"),
        "output_dir": str(output_dir),
    }
    if case.stage != "sft":  # policy and reference start from the same weights
        flags["model_name_or_path"] = str(folder / "sft" / "model")
    return flags


def start(case: Case, folder: Path, output_dir: Path, tally: Tally) -> Script:
    """Start a run, each time from a process that hashes texts differently."""
    flags = flags_of(case, folder, output_dir)
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    options = ("--standalone", "--nproc_per_node", str(case.num_ranks))
    return Script(
        [ROOT / f"train_{case.stage}.py", *words],
        output_dir.parent / "log.txt",
        options if case.num_ranks > 1 else (),
        server=tally.restarts % 2,
    )


def run_undisturbed(case: Case, folder: Path, output_dir: Path) -> None:
    """Run a case in one go, on forks of a process that has imported the scripts."""
    jobs = [{"stage": case.stage, "flags": flags_of(case, folder, output_dir)}]
    launch(run_stages, case.num_ranks, folder, timeout=600, jobs=jobs)


def prepare(folder: Path) -> None:
    """Make the tokenizer, the model's shape and the SFT model that later stages start from."""
    from common.text import synthetic

    synthetic.train_tokenizer(512).save_pretrained(folder / "tokenizer")
    (folder / "gpt2.json").write_text(json.dumps(TINY_GPT2 | {"n_embd": 64}))
    run_undisturbed(Case("sft"), folder, folder / "sft")


# ---- killing -------------------------------------------------------------------------------------


def kill_at_random(
    script: Script, output_dir: Path, kind: str, draw: random.Random, tally: Tally
) -> bool:
    """Kill a run at a random moment; whether it was still there to be killed.

    "all" and "one" are SIGKILL for all processes or one rank, "stop" is SIGTERM for a rank. One
    kill in four comes within three seconds of the start: in loading, resuming, the first steps.
    The others, and every SIGTERM, come after a new checkpoint.
    """
    first, is_early = newest_step(output_dir), kind != "stop" and draw.random() < 0.25
    while not is_early and script.poll() is None and newest_step(output_dir) in (-1, first):
        time.sleep(0.02)
    wait_until = time.monotonic() + draw.uniform(0, 3 if is_early else 1.5)
    while script.poll() is None and time.monotonic() < wait_until:
        time.sleep(0.002)
    if script.poll() is not None:
        return False
    victims = [pid for pid in script.processes() if pid != script.pid] or [script.pid]
    is_stop = kind == "stop"
    tally.early += is_early
    is_saving = any((output_dir / "checkpoints").glob("*.partial"))
    try:
        if kind == "all":
            for pid in {*victims, script.pid}:
                os.kill(pid, signal.SIGKILL)
        else:
            os.kill(draw.choice(victims), signal.SIGTERM if is_stop else signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        script.wait(timeout=600)
        return False
    status = script.wait(timeout=120)
    if is_stop and status not in (0, 1, 128 + signal.SIGTERM):  # 1 is torchrun's
        raise RuntimeError(f"SIGTERM ended a run of {output_dir} with status {status}")
    tally.stops += is_stop
    tally.kills += not is_stop
    tally.while_saving += is_saving and not is_stop
    return True


def newest_step(output_dir: Path) -> int:
    """The newest checkpoint's step, -1 for none."""
    folders = sorted((output_dir / "checkpoints").glob("step_*[0-9]"))
    return int(folders[-1].name[5:]) if folders else -1


# ---- comparing -----------------------------------------------------------------------------------


def differences(whole: Path, other: Path) -> list[str]:
    """Differences between a run that was never killed and one that was."""
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*.safetensors"))]
    odd = [str(name) for name in names if not same_tensors(whole / name, other / name)]
    for name in ("samples.jsonl", "model/model.safetensors"):
        if (whole / name).read_bytes() != (other / name).read_bytes():
            odd.append(name)
    return odd + (["metrics.jsonl"] if untimed_lines(whole) != untimed_lines(other) else [])


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two files have the same tensors to the bit; the order in a header is arbitrary."""
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def num_lost(whole: Path, other: Path) -> int:
    """Lines of metrics that are missing or doubled."""
    count = Counter(json.dumps(line, sort_keys=True) for line in untimed_lines(whole))
    count.subtract(json.dumps(line, sort_keys=True) for line in untimed_lines(other))
    return sum(abs(value) for value in count.values())


def drill(case: Case, kinds: Sequence[str], folder: Path, draw: random.Random) -> Tally:
    """Kill runs of a case in all these ways; compare each that came to its end."""
    tally, left = Tally(), list(kinds)
    base = Path(tempfile.mkdtemp(dir=folder))
    whole = base / "whole"
    try:
        run_undisturbed(case, folder, whole)
        while left or not tally.runs:
            tally.runs += 1
            output_dir = base / f"killed_{tally.runs}"
            script = start(case, folder, output_dir, tally)
            while left and kill_at_random(script, output_dir, left[-1], draw, tally):
                left.pop()
                tally.restarts += 1
                script = start(case, folder, output_dir, tally)
            if script.wait(timeout=600) != 0:
                text = script.log.read_text()[-3000:]
                raise RuntimeError(f"a run failed; the end of {script.log}:\n{text}")
            odd = differences(whole, output_dir)
            tally.identical += not odd
            tally.lost_steps += num_lost(whole, output_dir)
            tally.wrong += [f"run {tally.runs} differs in {', '.join(odd)}"] if odd else []
    except (AssertionError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"{case} on {case.num_ranks}: {error}", file=sys.stderr, flush=True)
        tally.wrong.append(f"run {tally.runs} failed")
    return tally


def ways_of(num_kills: int, draw: random.Random) -> list[str]:
    """So many kills, half of them of one rank, and a stop, in any order."""
    kinds = [("all", "one")[n % 2] for n in range(num_kills)] + ["stop"]
    draw.shuffle(kinds)
    return kinds


def row(case: Case, tally: Tally) -> str:
    ended = f"{tally.identical} of {tally.runs}"
    if tally.wrong:
        ended = f"**{ended}: {'; '.join(tally.wrong)}**"
    kinds = [tally.kills, tally.early, tally.while_saving, tally.stops, tally.restarts]
    return f"| {' | '.join(map(str, [case, case.num_ranks, *kinds, ended]))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="so many, over all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of who is killed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    draw, started = random.Random(arguments.seed), time.monotonic()
    headers = ["case", "ranks", "SIGKILL", "of them early", "while saving", "SIGTERM", "restarts"]
    print(f"| {' | '.join([*headers, 'identical'])} |\n|{'---|' * 8}", flush=True)
    tallies, done = [], 0
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for number, case in enumerate(CASES, start=1):
            due = arguments.kills * number // len(CASES)
            tally = drill(case, ways_of(due - done, draw), Path(name), draw)
            tallies, done = [*tallies, tally], due
            print(row(case, tally), flush=True)
    kills, runs = sum(t.kills for t in tallies), sum(t.runs for t in tallies)
    identical, lost = sum(t.identical for t in tallies), sum(t.lost_steps for t in tallies)
    print(
        f"\n{kills} kills, {sum(t.stops for t in tallies)} stops, "
        f"{sum(t.restarts for t in tallies)} restarts; {identical} of {runs} runs identical; "
        f"{lost} lines of metrics lost or doubled; "
        f"{(time.monotonic() - started) / 60:.0f} minutes"
    )
    sys.exit(1 if any(t.wrong or t.lost_steps for t in tallies) else 0)


if __name__ == "__main__":
    main()
