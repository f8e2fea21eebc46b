"""Every recorded figure by one command, on one commit.

    make results                              # all parts; goes on where it was stopped
    make results PARTS="demo variants"        # some; another call may make others at the same time
    make results FLAGS=--list                 # the parts, what they run, and their records

A part is one or more commands, which run on the CPU. What is kept of it goes to
`assets/results/<part>`, beside `record.json`: command, commit, machine, versions, date, checksums
of what came from elsewhere, and minutes over all starts. A part with a record of this commit, or of
one from which only comments of recipes differ, is not made again. The commit is the last one that
changed what figures depend on (`CODE`), of which nothing may differ from it. Commands run in a
clone of that commit, `output/results/<commit>`, so that nothing edited meanwhile is measured; a
part's own folder there, `output/<part>`, is gone on with. Parts that measure time (`bench-*`) want
the machine for themselves. In the end the tables of README and `docs/` are made anew (`tables.py`).
"""

import argparse
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from common.checkpoint.files import describe
from common.record.folder import cpu_model
from common.record.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "assets" / "results"
RECORD, STARTS, REWARDS = "record.json", "starts.json", "rewards.jsonl"
# What a figure depends on, as git's paths; a test holds that these modules import no other tests.
CODE = (
    *(":(glob)*.py", "common", "assets/recipes", "requirements.txt", "experiments/bench"),
    *("tests/fault_drill.py", "tests/variants.py", "tests/ranks.py"),
)
PACKAGES = ("torch", "transformers", "numpy", "trl")
TICK = 30  # seconds between two notes of how long a part has run, for one that is killed


@dataclass(frozen=True)
class Part:
    """Commands and what is kept of them."""

    commands: tuple[str, ...]  # behind `python -m`; {out} is the part's folder
    keep: tuple[str, ...]  # globs in the folder; `printed.md` has what was printed
    folder: str = "{out}"
    needs: tuple[str, ...] = ()  # what only another part or a download makes
    makes: tuple[str, ...] = ()  # rows that it makes of that, unless they are there
    finds: bool = False  # whether its status 1 without a traceback is a finding, and recorded
    writes_texts: bool = False  # of which some are kept, and what each got

    def commands_to(self, out: str) -> list[str]:
        """The commands with their folder."""
        return [command.format(out=out) for command in self.commands]


NUM_SAMPLES = 3
SWEEP = "experiments.sweep --output_dir {out} --config"
REPLICATE = "experiments.replicate --num_processes 2 --output_dir {out} --recipe"
SWEPT = ("sweep.json", "report.md", "plots/*.png")
CHAIN = (
    *("replication.json", "report.md", "seed_*/*/metrics.jsonl"),
    "seed_*/evaluation/results.json",
)
BENCH = ("results.json", "table.md")
TRAINED = tuple(f"output/demo/seed_0/{stage}/model" for stage in ("sft", "reward"))
TOO_FAR = (
    "train_grpo --config assets/recipes/demo/grpo.yaml --beta 0.02 --max_steps 160 --eval_steps 10 "
    f"--eval_pairs_dataset_name synthetic --model_name_or_path {TRAINED[0]} "
    f"--reward_funcs {TRAINED[1]} gold --output_dir {{out}}"
)
PARTS = {
    "demo": Part((f"{REPLICATE} demo",), CHAIN),
    "too-far": Part((TOO_FAR,), ("metrics.jsonl", "plots/curves.png"), needs=TRAINED),
    "ablations": Part((f"{SWEEP} assets/recipes/ablations/demo.yaml",), SWEPT),
    "iterative": Part((f"{SWEEP} assets/recipes/iterative/demo.yaml",), SWEPT),
    "overoptimization": Part(
        (
            "experiments.overoptimization --output_dir {out} "
            "--config assets/recipes/overoptimization/demo.yaml --seeds 0 1 2 3 4 5 6 7",
        ),
        ("results.json", "report.md", "plots/*.png"),
    ),
    "scitldr": Part(  # the model: a folder, or a link to one
        (f"{REPLICATE} scitldr --overrides model_name_or_path=data/SmolLM2-135M-Instruct",),
        CHAIN,
        needs=("data/SmolLM2-135M-Instruct", "data/scitldr", "data/summeval_preference"),
        writes_texts=True,
    ),
    "one-sentence": Part(  # `reward_curve.py` draws it
        (f"{REPLICATE} one-sentence --overrides model_name_or_path=data/SmolLM2-135M-Instruct",),
        CHAIN,
        needs=("data/SmolLM2-135M-Instruct", "data/scitldr"),
        makes=("data/one-sentence",),
        writes_texts=True,
    ),
    "bench-tiny": Part(
        ("experiments.bench --model tiny --resume",),
        BENCH,
        "output/bench/tiny",
    ),
    "bench-gpt2-small": Part(
        ("experiments.bench --model gpt2-small --rounds 1 --resume",),
        BENCH,
        "output/bench/gpt2-small",
    ),
    "plans": Part(("experiments.plan.against_run",), ("printed.md",), finds=True),
    "variants": Part(("tests.variants",), ("printed.md",)),
    "kills": Part(("tests.fault_drill --kills 50",), ("printed.md",), finds=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make what has no record of this commit; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="what there is, and run nothing")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.list:
        print("\n".join(map(told, PARTS)))
        return 0
    for asked in (signal.SIGTERM, signal.SIGHUP):  # a part's processes must not be left
        signal.signal(asked, lambda number, _: sys.exit(128 + number))
    commit = code_commit()
    clone = clone_of(commit)
    made = [is_made(name, commit, clone) for name in arguments.parts or PARTS]
    return 0 if all(made) else 1


def is_made(name: str, commit: str, clone: Path) -> bool:
    """Make a part unless it has a record of this commit; False if it failed.

    What lacks something, or is being made by another call, is said and left out.
    """
    part, record = PARTS[name], read_record(name)
    out = clone / "output" / name
    commands = part.commands_to(f"output/{name}")
    if record.get("commands") == commands and is_same_code(record["git_commit"], commit):
        print(f"{name}: recorded", flush=True)
        return True
    if lacking := [path for path in part.needs if not (clone / path).exists()]:
        print(f"{name}: left out, since {' and '.join(lacking)} is not there", flush=True)
        return True
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".made_by", wait=False) as is_ours:
        if not is_ours:
            print(f"{name}: left out, since another call makes it", flush=True)
            return True
        print(f"{name}: {'; '.join(commands)} (prints to {out}/printed.md)", flush=True)
        status = run(commands, clone, out)
        seconds = json.loads((out / STARTS).read_text())
        is_finding = part.finds and status == 1 and "Traceback" not in (out / "errors").read_text()
        if status and not is_finding:
            print(f"{name}: failed with status {status}; see {out}/errors", flush=True)
            return False
        record = {
            "commands": commands,
            "status": status,
            "git_commit": commit,
            "inputs": {path: checksums(clone / path) for path in (*part.needs, *part.makes)},
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "minutes": round(sum(seconds) / 60, 1),
            "starts": len(seconds),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {d.name: d.version for d in metadata.distributions() if d.name in PACKAGES},
        }
        from experiments.records import tables

        with locked(clone.parent / ".lock"):
            keep(name, clone, out, record)
            tables.write()
    print(told(name), flush=True)
    return True


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name in the folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): describe(file)["sha256"] for file in files}


def run(commands: Sequence[str], clone: Path, out: Path) -> int:
    """Run the commands in turn: the first status that is not 0, else 0.

    `printed.md` and `errors` get what they print, `starts.json` the seconds of every start.
    """
    file = out / STARTS
    earlier = json.loads(file.read_text()) if file.is_file() else []
    started = time.perf_counter()
    with (out / "printed.md").open("w") as printed, (out / "errors").open("w") as errors:
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, "-m", *command.split()],
                cwd=clone,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=printed,
                stderr=errors,
            )
            try:
                while process.poll() is None:
                    write_json(file, [*earlier, round(time.perf_counter() - started, 1)])
                    try:
                        process.wait(TICK)
                    except subprocess.TimeoutExpired:
                        continue
            finally:  # Ctrl-C too: the child saves what it has, and must not be left
                process.terminate()
                process.wait()
                write_json(file, [*earlier, round(time.perf_counter() - started, 1)])
            if process.returncode:
                return process.returncode
    return 0


def keep(name: str, clone: Path, out: Path, record: dict[str, Any]) -> None:
    """Put what is kept of a part, with its record, in the place of what was recorded of it.

    Raises:
        FileNotFoundError: a glob finds nothing; the old record is as it was.
    """
    part, new = PARTS[name], RECORDS / f".{name}"
    folder = clone / part.folder.format(out=out)
    found = {pattern: sorted(folder.glob(pattern)) for pattern in part.keep}
    if missing := [pattern for pattern, files in found.items() if not files]:
        raise FileNotFoundError(f"{name}: nothing is {' or '.join(missing)} in {folder}")
    shutil.rmtree(new, ignore_errors=True)
    for file in (file for pattern in part.keep for file in found[pattern]):
        target = new / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    if part.writes_texts:
        keep_completions(folder, new)
    write_json(new / RECORD, record)
    shutil.rmtree(RECORDS / name, ignore_errors=True)
    new.rename(RECORDS / name)


def keep_completions(folder: Path, new: Path) -> None:
    """Some texts of the first seed; of all what each completion got, and whether it stopped."""
    files = sorted(folder.glob("seed_*/evaluation/completions.jsonl"))
    write_jsonl(new / "samples.jsonl", read_jsonl(files[0])[:NUM_SAMPLES])
    for file in files:
        found = [
            {
                name: [
                    {key: own[key] for key in ("rewards", "stopped")}
                    for own in (first, *line["further"].get(name, ()))
                ]
                for name, first in line["systems"].items()
            }
            for line in read_jsonl(file)
        ]
        write_jsonl(new / file.relative_to(folder).with_name(REWARDS), found)


def write_jsonl(file: Path, lines: Sequence[Any]) -> None:
    """Write a JSON object to a line."""
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def told(name: str) -> str:
    """A line about a part and its record."""
    record = read_record(name)
    made = "{minutes} minutes, {date}, {git_commit:.12}, {cpu}" if record else "not recorded"
    commands = "; ".join(PARTS[name].commands_to(f"output/{name}"))
    return f"{name}: {commands} ({made.format(**record)})"


def read_record(name: str) -> dict[str, Any]:
    """`record.json` of a part; empty where there is none."""
    return read(f"{name}/{RECORD}")


def read(file: str) -> dict[str, Any]:
    """JSON among the records, by its path there; empty where there is none."""
    path = RECORDS / file
    return json.loads(path.read_text()) if path.is_file() else {}


def printed(file: str) -> str:
    """Text among the records, as it stands."""
    return (RECORDS / file).read_text().strip()


def write_json(file: Path, value: Any) -> None:
    """Write JSON to be read."""
    file.write_text(json.dumps(value, indent=1) + "\n")


# ---- the commit ----------------------------------------------------------------------------------


def code_commit() -> str:
    """The last commit that changed what figures depend on.

    Exits with a sentence where something of it differs.
    """
    if changed := git("status", "--porcelain", "--", *CODE):
        sys.exit(f"error: a record is of a commit; commit or undo first:\n{changed}")
    return git("log", "-1", "--format=%H", "--", *CODE)


def is_same_code(old: str, new: str) -> bool:
    """Whether of `CODE` nothing but comments of recipes differs between two commits."""
    if old not in git("rev-list", new).split():  # as in a shallow clone
        return False
    changes = git("diff", "--name-status", old, new, "--", *CODE).splitlines()
    for status, path in (change.split("\t", 1) for change in changes):
        if status != "M" or not path.endswith(".yaml"):
            return False
        values = (yaml.safe_load(git("show", f"{of}:{path}")) for of in (old, new))
        if len({json.dumps(own) for own in values}) > 1:  # which tells true from 1
            return False
    return True


def clone_of(commit: str) -> Path:
    """The commit in a folder of its own, with this tree's `data`; made if it is not there."""
    clone = ROOT / "output" / "results" / commit[:12]
    with locked(clone.parent / ".lock"):
        if not clone.exists():
            new = clone.with_name(f"{clone.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            git("clone", "--quiet", "--no-checkout", str(ROOT), str(new))
            git("-C", str(new), "checkout", "--quiet", "--detach", commit)
            (new / "data").symlink_to(ROOT / "data")
            new.rename(clone)
        if changed := git("-C", str(clone), "diff", "--name-only", commit, "--", *CODE):
            sys.exit(f"error: {clone} is not its commit any more; remove it:\n{changed}")
    return clone


@contextmanager
def locked(file: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a file that one process can hold at a time; without waiting whether it could be had."""
    file.parent.mkdir(parents=True, exist_ok=True)
    held: IO[str]
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def git(*arguments: str) -> str:
    """What git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
