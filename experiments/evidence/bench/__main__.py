"""Speed and peak memory of every stage against TRL, in turns, in one call.

    make bench                             # random GPT-2 of 4 layers, 256 wide
    make bench BENCH_MODEL=gpt2-small      # 12 layers, 768 wide
    make bench BENCH_FLAGS="--bf16"        # both sides in bfloat16, on a CPU that multiplies it
    python -m experiments.evidence.bench --stages sft dpo
    python -m experiments.evidence.bench --resume   # goes on where the same command was stopped

Each row runs TRL, ours, then ours, TRL (`--rounds`), every run in a separate process; the first
steps are warm-up. A round's figure is the median of its steps; a row's is the median of its rounds,
its ratio's range that of the rounds. Writes `results.json` and `table.md` to
`output/bench/<model>`, with `--bf16` to `<model>-bf16`. Fails where the first steps of both sides
differ in loss or gradient norm; those of GRPO do, since each side samples.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from common.record import environment
from common.record.jsonl import write_atomically
from common.report import markdown
from experiments.evidence.bench import flops, processes, sides
from experiments.evidence.bench.rows import REACH_MEMORY, ROWS, SHAPES, BenchRow, num_steps
from experiments.evidence.bench.sides import SIDES

REACH_OF_LARGER = 0.85  # of the tiny model's ratios, which a larger model must reach
# Of the first loss and gradient norm, relative; in bfloat16 its unit: the sides round elsewhere
TOLERANCES = {"float32": 1e-4, "bfloat16": 2**-8}
Result = dict[str, Any]


def main() -> None:
    """Build the fixture, measure, write, compare the first steps."""
    arguments = parse_arguments()
    folder = folder_of(arguments)
    fixture = folder / "fixture"
    build = ["-m", "experiments.evidence.bench.fixture", f"--model={arguments.model}"]
    build += [f"--folder={fixture}"]  # in a separate process: see `processes`
    processes.run(build, folder / "fixture.log", threads=arguments.threads)
    results = measure(arguments, folder)
    about_texts = json.loads((fixture / "fixture.json").read_text())
    results["rows"] = summarise(results, arguments, about_texts)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    table = render(results)
    (folder / "table.md").write_text(table + "\n")
    print(f"\n{table}")
    print(f"\nresults and table are in {folder.relative_to(processes.REPOSITORY)}")
    tolerance = TOLERANCES[results["dtype"]]
    if wrong := [row["row"] for row in results["rows"] if row["difference"] > tolerance]:
        raise SystemExit(f"the first steps of TRL and ours differ in: {', '.join(wrong)}")


def folder_of(arguments: argparse.Namespace) -> Path:
    """Where everything is written."""
    name = arguments.model + "-bf16" * arguments.bf16
    return processes.REPOSITORY / "output" / "bench" / name


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    names = list(ROWS)
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="rows to run")
    parser.add_argument("--rounds", type=int, default=2, help="TRL and ours, so many times")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 on both sides")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    resume_help = "take runs that this code left in runs.json as they are"
    parser.add_argument("--resume", action="store_true", help=resume_help)
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace, folder: Path) -> Result:
    """All runs, in turns."""
    rows = [ROWS[name] for name in arguments.stages]
    file = folder / "runs.json"
    runs: list[Result] = json.loads(file.read_text()) if arguments.resume and file.exists() else []
    finished = {(one["row"], one["side"], one["round"]) for one in runs}
    for round_number in range(1, arguments.rounds + 1):
        for row in rows:
            for side in SIDES[:: 1 if round_number % 2 else -1]:  # either is first in turn
                if (row.name, side, round_number) in finished:
                    continue
                print(f"round {round_number} of {arguments.rounds}: {row.name}, {side}", flush=True)
                output_dir = folder / "runs" / f"{row.name}-{side}-{round_number}"
                steps, _ = num_steps(row, arguments.model)
                # The seed gives other samples in every round, so that lengths average out.
                settings = {"threads": arguments.threads, "seed": round_number}
                settings |= {"bf16": arguments.bf16}
                result = sides.run(side, row, folder / "fixture", steps, output_dir, **settings)
                runs.append({"row": row.name, "side": side, "round": round_number, **result})
                # What is there already survives an interruption of the rest.
                write_atomically(file, [json.dumps(runs, indent=1) + "\n"])
    return {
        "model": arguments.model,
        "dtype": "bfloat16" if arguments.bf16 else "float32",
        "machine": machine(arguments.threads),
        "runs": runs,
    }


def machine(threads: int) -> Result:
    """Processor, threads and versions."""
    return {
        "cpu": environment.cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "versions": environment.versions(("torch", "transformers", "trl")),
    }


def summarise(results: Result, arguments: argparse.Namespace, fixture: Result) -> list[Result]:
    """The figures of each row from its runs."""
    model, table = results["model"], []
    for row in (ROWS[name] for name in arguments.stages):
        lengths = fixture["lengths"][row.data_name]
        line: Result = {"row": row.name, "unit": row.unit, "reach": row.reach, "difference": 0.0}
        if row.reach and model != "tiny":
            line["reach"] = row.reach * REACH_OF_LARGER
        of_row = [run for run in results["runs"] if run["row"] == row.name]
        for side in SIDES:
            runs = [run for run in of_row if run["side"] == side]
            line[side] = side_figures(row, runs, lengths, model)
        if row.stage != "grpo":
            values = ([run[name] for run in of_row] for name in ("loss", "grad_norm"))
            line["difference"] = max(max(each) / min(each) - 1 for each in values)
        pairs = zip(line["trl"]["by_round"], line["ours"]["by_round"], strict=True)
        line["ratio_by_round"] = [ours / trl for trl, ours in pairs]
        line["ratio"] = line["ours"]["speed"] / line["trl"]["speed"]
        line["memory_ratio"] = line["ours"]["peak_mb"] / line["trl"]["peak_mb"]
        table.append(line)
    return table


def side_figures(
    row: BenchRow, runs: list[Result], lengths: dict[str, list[int]], model: str
) -> Result:
    """Speed and memory of one side of a row: medians over its rounds."""
    units, warmup = flops.step_units(row, lengths), num_steps(row, model)[1]
    seconds = [median(run["step_seconds"][warmup:]) for run in runs]
    return {
        "speed": units / median(seconds),
        "by_round": [units / value for value in seconds],
        "peak_mb": median(run["peak_mb"] for run in runs),
        "completion_length": median(run.get("completion_length", 0.0) for run in runs),
    }


def render(results: Result) -> str:
    """The Markdown table with the machine under it."""
    heads = ["row", "unit", "TRL", "ours", "ratio (rounds)", "our aim", "peak MB TRL / ours"]
    heads += [f"memory ratio (our aim: {REACH_MEMORY})", "tokens per rollout TRL / ours"]
    rows = []
    for line in results["rows"]:
        trl, ours = (line[side] for side in SIDES)
        low, high = min(line["ratio_by_round"]), max(line["ratio_by_round"])
        lengths = f"{trl['completion_length']:.1f} / {ours['completion_length']:.1f}"
        cells = [f"{trl['speed']:.4g}", f"{ours['speed']:.4g}"]
        cells += [f"{line['ratio']:.2f} ({low:.2f}..{high:.2f})"]
        cells += [f"{line['reach']:.2g}" if line["reach"] else "-"]
        cells += [f"{trl['peak_mb']:.0f} / {ours['peak_mb']:.0f}", f"{line['memory_ratio']:.2f}"]
        rows.append(
            [line["row"], line["unit"], *cells, lengths if trl["completion_length"] else ""]
        )
    here, difference = results["machine"], max(line["difference"] for line in results["rows"])
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    note = (
        f"{results['model']} model, {results['dtype']}, {here['cpu']}, {here['cores']} cores, "
        f"{here['threads']} thread(s) per process, {versions}. Losses and gradient norms of first "
        f"steps differ by up to {difference:.0e} of their value."
    )
    return f"{markdown.table(heads, rows)}\n\n{note}"


if __name__ == "__main__":
    main()
