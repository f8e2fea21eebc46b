"""Every recorded figure by one command, on one commit.

    make results                              # all parts; resumes where it was stopped
    make results PARTS="demo variants"        # some

A part is a command. It runs on the CPU; `film-*` takes a GPU where there is one. What is kept of
it goes to `assets/results/<part>`, with `record.json`: command, commit, machine, versions, date,
checksums of its inputs, and minutes over all starts. A part with a record of this code is not made
again: of this commit, or of one with the same golden trajectories and recipes (`current.py`). The
commit is the last one that changed the code of figures (`CODE`), from which nothing may differ.
Commands run in a git worktree of it, `output/results/<commit>`, so later edits do not change what
is measured. Parts that measure time (`bench-*`) want the machine for themselves. In the
end the tables of README and `docs/` are made anew (`tables.py`).
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint.layout import describe
from common.record.run_folder import accelerator, cpu_model, versions
from experiments.evidence.records import current
from experiments.evidence.records.texts import keep_completions, keep_measured
from experiments.runs.stages import exit_with_status

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "assets" / "results"
RECORD, STARTS = "record.json", "starts.json"
# The code of figures, as git's paths; a test checks that these modules import no other tests.
CODE = (
    *(":(glob)*.py", "common", "assets/recipes", "assets/requirements.lock", "experiments"),
    *(f":(exclude)experiments/evidence/{own}" for own in ("records", "make.py", "tables.py")),
    *("tests/fault_drill.py", "tests/variants.py"),
    "tests/ranks.py",
)
PACKAGES = ("torch", "transformers", "numpy", "trl")
STAGES = ("sft", "reward", "dpo", "grpo")


@dataclass(frozen=True)
class Part:
    """A command and what is kept of it."""

    command: str  # behind `python -m`; {out} is the part's folder
    keep: tuple[str, ...]  # globs in the folder; `printed.md` has what was printed
    folder: str = "{out}"
    needs: tuple[str, ...] = ()  # what only another part or a download makes
    reads: tuple[str, ...] = ()  # recipes that the command does not name
    stages: tuple[str, ...] = STAGES  # whose trajectories decide the figures; none: the commit does
    texts: Callable[[Path, Path], None] | None = None  # copies scores and texts of completions
    threads: int = 1  # of each process
    takes_gpu: bool = False  # if there is one
    python: str = sys.executable  # or that of another environment, by its path in the project


SWEEP = "experiments.runs.sweep --output_dir {out} --config"
REPLICATE = "experiments.runs.replicate --num_processes 2 --output_dir {out} --recipe"
SMOLLM2 = "data/SmolLM2-135M-Instruct"  # a folder, or a link to one
SWEPT = ("sweep.json", "report.md", "plots/*.png")
CHAIN = (
    *("replication.json", "report.md", "seed_*/*/metrics.jsonl"),
    "seed_*/evaluation/results.json",
)
FILM = (  # in one process, of several threads
    "experiments.runs.replicate --output_dir {out} --recipe film "
    f"--overrides model_name_or_path={SMOLLM2}"
)
FRONTIER = (
    *CHAIN,
    "seed_*/evaluation*/scores.jsonl",
    "seed_*/evaluation-means/results.json",
    "seed_*/frontier/seed_*/*/metrics.jsonl",
    "seed_*/frontier/seed_*/measured/*.json",
)
BENCH = ("results.json", "table.md")
DEMO = "assets/recipes/demo"
TRAINED = tuple(f"output/demo/seed_0/{stage}/model" for stage in ("sft", "reward"))
TOO_FAR = (
    "train_grpo --config assets/recipes/demo/grpo.yaml --beta 0.02 --max_steps 160 --eval_steps 10 "
    f"--eval_pairs_dataset_name synthetic --model_name_or_path {TRAINED[0]} "
    f"--reward_funcs {TRAINED[1]} gold --output_dir {{out}}"
)
EXPLAINED = {  # from the models of the part `demo`; flags of each stage
    "sft": "",
    "reward": f"--model_name_or_path {TRAINED[0]}",
    "dpo": f"--model_name_or_path {TRAINED[0]}",
    "grpo": f"--model_name_or_path {TRAINED[0]} --reward_funcs {TRAINED[1]} gold "
    "--num_candidates 4 --num_generations 2",
}
PARTS = {
    "demo": Part(f"{REPLICATE} demo", CHAIN),
    "too-far": Part(
        TOO_FAR,
        ("metrics.jsonl", "plots/curves.png"),
        needs=TRAINED,
        reads=(f"{DEMO}/sft.yaml", f"{DEMO}/reward.yaml"),
    ),
    "ablations": Part(f"{SWEEP} assets/recipes/ablations/demo.yaml", SWEPT),
    "iterative": Part(f"{SWEEP} assets/recipes/iterative/demo.yaml", SWEPT),
    "overoptimization": Part(
        "experiments.runs.overoptimization --output_dir {out} "
        "--config assets/recipes/overoptimization/demo.yaml --seeds 0 1 2 3 4 5 6 7",
        ("results.json", "report.md", "plots/*.png"),
    ),
    "scitldr": Part(
        f"{REPLICATE} scitldr --overrides model_name_or_path={SMOLLM2}",
        CHAIN,
        needs=(SMOLLM2, "data/scitldr", "data/summeval_preference"),
        texts=keep_completions,
    ),
    "one-sentence": Part(  # `reward_curve.py` draws it
        f"{REPLICATE} one-sentence --overrides model_name_or_path={SMOLLM2}",
        CHAIN,
        needs=(SMOLLM2, "data/scitldr"),
        texts=keep_completions,
    ),
    **{
        f"film-{name}": Part(
            f"{FILM} {flags}",
            FRONTIER,
            needs=(SMOLLM2, "data/film"),
            texts=partial(keep_measured, with_texts=name == "0"),
            threads=2,
            takes_gpu=True,
        )
        for name, flags in {
            "0": "--seeds 0",
            "1": "--seeds 1",
            "2": "--seeds 2",
            "bf16": "bf16=true --seeds 0",
        }.items()
    },
    "film-baselines": Part(
        "assets.recipes.film.baselines --source data/vaderSentiment-3.3.2.tar.gz --target {out}",
        ("scores.json",),
        needs=("data/film",),
        stages=(),
    ),
    "bench-tiny": Part(
        "experiments.evidence.bench --model tiny --resume", BENCH, "output/bench/tiny", stages=()
    ),
    "bench-gpt2-small": Part(
        "experiments.evidence.bench --model gpt2-small --rounds 1 --resume",
        BENCH,
        "output/bench/gpt2-small",
        stages=(),
    ),
    "bench-quality": Part(
        "experiments.evidence.bench.quality",
        BENCH,
        "output/bench/quality",
        stages=(),
        python=".venv-bench/bin/python",
    ),
    "conformance": Part(
        "experiments.evidence.conformance",
        ("printed.md",),
        stages=(),
        python=".venv-conformance/bin/python",
    ),
    "exercises": Part(
        "experiments.evidence.exercises --models output/demo/seed_0 --output_dir {out}",
        ("printed.md",),
        needs=TRAINED,
        reads=("assets/recipes/exercises/demo.yaml", f"{DEMO}/sft.yaml", f"{DEMO}/reward.yaml"),
    ),
    **{
        f"explain-{stage}": Part(
            f"experiments.explain train_{stage}.py --config assets/recipes/demo/{stage}.yaml "
            f"--output {{out}}/{stage}.html {flags}".strip(),
            (f"{stage}.html",),
            needs=TRAINED if flags else (),
            stages=(),  # a page is of its commit: it shows lines of code
        )
        for stage, flags in EXPLAINED.items()
    },
    "plans": Part("experiments.evidence.against_run", ("printed.md",), stages=()),
    "variants": Part("tests.variants", ("printed.md",)),
    "kills": Part("tests.fault_drill --kills 50", ("printed.md",), stages=()),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make what has no record of this code; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parts = parser.parse_args(argv).parts
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    commit = code_commit()
    tree = worktree(commit)
    made = [make(name, commit, tree) for name in parts or PARTS]
    return 0 if all(made) else 1


def make(name: str, commit: str, tree: Path) -> bool:
    """Make a part unless it has a record of this code or lacks an input; False if it failed."""
    part, record = PARTS[name], read_record(name)
    out, command = tree / "output" / name, part.command.format(out=f"output/{name}")
    if is_same_command(record, command) and record["git_commit"] == commit:
        print(f"{name}: recorded", flush=True)
        return True
    if part.stages and record and not what_changed(name):
        was = record["git_commit"][:10]
        print(f"{name}: recorded on {was}, with the trajectories of this code", flush=True)
        return True
    if lacking := [path for path in part.needs if not (tree / path).exists()]:
        print(f"{name}: left out, since {' and '.join(lacking)} is not there", flush=True)
        return True
    trajectories = current.trajectories(part.stages, ROOT)
    print(f"{name}: {command} (prints to {out}/printed.md)", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    if status := run([str(ROOT / part.python), "-m", *command.split()], tree, out, part):
        print(f"{name}: failed with status {status}; see {out}/errors", flush=True)
        return False
    seconds = json.loads((out / STARTS).read_text())
    record = {
        "commands": [command],
        "git_commit": commit,
        "trajectories": trajectories,
        "settings": current.settings(" ".join((command, *part.reads)), tree),
        "inputs": {path: checksums(tree / path) for path in part.needs},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "minutes": round(sum(seconds) / 60, 1),
        "starts": len(seconds),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gpu": accelerator(1)["gpu"] if part.takes_gpu else None,
        "python": platform.python_version(),
        "packages": {name: v for name, v in versions().items() if name in PACKAGES},
    }
    from experiments.evidence import tables

    keep(name, tree, out, record)
    tables.write()
    print(f"{name}: recorded in {record['minutes']} minutes", flush=True)
    return True


def what_changed(name: str) -> str:
    """What has changed since a part was recorded, as far as it moves its figures."""
    part, record = PARTS[name], read_record(name)
    command = part.command.format(out=f"output/{name}")
    today = current.trajectories(part.stages, ROOT)
    if "trajectories" in record and current.have_moved(record["trajectories"], today):
        return "the golden trajectories"
    settings = current.settings(" ".join((command, *part.reads)), ROOT)
    same = is_same_command(record, command) and record.get("settings") == settings
    return "" if same else "the settings"


def is_same_command(record: dict[str, Any], command: str) -> bool:
    """Whether a record is of a command, whose module may have moved to another folder."""
    commands = [*record.get("commands", ()), command]
    return len({re.sub(r"^[\w.]*\.", "", text) for text in commands}) == 1 < len(commands)


def run(command: Sequence[str], tree: Path, out: Path, part: Part) -> int:
    """Run a part's command: its exit status. `starts.json` gets the seconds of every start."""
    file = out / STARTS
    earlier = json.loads(file.read_text()) if file.is_file() else []
    environment = {"OMP_NUM_THREADS": str(part.threads)}
    if not part.takes_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.perf_counter()
    with (out / "printed.md").open("w") as printed, (out / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | environment, stdout=printed, stderr=errors
        )
        try:
            process.wait()
        finally:  # Ctrl-C too: the child saves its state, and must end
            process.terminate()
            process.wait()
            write_json(file, [*earlier, round(time.perf_counter() - started, 1)])
    return process.returncode


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name in the folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): describe(file)["sha256"] for file in files}


def keep(name: str, tree: Path, out: Path, record: dict[str, Any]) -> None:
    """Replace the record of a part.

    Raises:
        FileNotFoundError: a glob finds nothing; the old record stays.
    """
    part, new = PARTS[name], RECORDS / f".{name}"
    folder = tree / part.folder.format(out=out)
    found = {pattern: sorted(folder.glob(pattern)) for pattern in part.keep}
    if missing := [pattern for pattern, files in found.items() if not files]:
        raise FileNotFoundError(f"{name}: nothing is {' or '.join(missing)} in {folder}")
    shutil.rmtree(new, ignore_errors=True)
    for file in (file for pattern in part.keep for file in found[pattern]):
        target = new / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    if part.texts:
        part.texts(folder, new)
    write_json(new / RECORD, record)
    shutil.rmtree(RECORDS / name, ignore_errors=True)
    new.rename(RECORDS / name)


def read_record(name: str) -> dict[str, Any]:
    """`record.json` of a part; empty where there is none."""
    return read(f"{name}/{RECORD}")


def read(file: str) -> dict[str, Any]:
    """JSON among the records, by its path there; empty where there is none."""
    path = RECORDS / file
    return json.loads(path.read_text()) if path.is_file() else {}


def printed(file: str) -> str:
    """Text among the records."""
    return (RECORDS / file).read_text().strip()


def cells(text: str) -> list[list[str]]:
    """The cells of the Markdown table in a text: the line of its heads, then the others."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [heads, *rows]


def write_json(file: Path, value: Any) -> None:
    """Write indented JSON."""
    file.write_text(json.dumps(value, indent=1) + "\n")


# ---- the commit ----------------------------------------------------------------------------------


def code_commit() -> str:
    """The last commit that changed `CODE`. Exits with a sentence where the tree differs from it."""
    if changed := git("status", "--porcelain", "--", *CODE):
        sys.exit(f"error: a record is of a commit; commit or undo first:\n{changed}")
    return git("log", "-1", "--format=%H", "--", *CODE)


def worktree(commit: str) -> Path:
    """A git worktree of the commit, with this tree's `data`; made if it is not there."""
    tree = ROOT / "output" / "results" / commit[:12]
    if not tree.exists():
        git("worktree", "add", "--quiet", "--force", "--detach", str(tree), commit)
        (tree / "data").symlink_to(ROOT / "data")
    return tree


def git(*arguments: str) -> str:
    """The output of a git command."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    exit_with_status(lambda: sys.exit(main()))  # a part's processes end with this one
