"""Speed of every stage on one GPU, compared with TRL: nine minutes, the most important first.

    python -m experiments.evidence.bench.gpu --resume  # what an earlier call had no time for
    python -m experiments.evidence.bench.gpu --parts trl --models gpt2-large
    python -m experiments.evidence.bench.gpu --tiny         # the same on a CPU, by a tiny model

Every case adds its line to `output/bench/gpu/results.jsonl` at once: what was measured, or the
error; `table.md` is next to it. All texts and random weights are made here. Seconds are medians of
steps between two waits for the GPU, without the first ones; one more step is under both profilers.
TRL's times leave out what `trl_stages.py` says.
"""

import argparse
import gc
import importlib
import itertools
import math
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from common import distributed
from common.config.parser import parse
from common.errors import gist
from common.model import fsdp
from common.record import environment, run_folder
from common.record.jsonl import json_line, read_jsonl
from common.record.metrics import PHASES
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.evidence.bench import fixture, flops, processes, sides
from experiments.evidence.bench.clock import median_seconds, timer
from experiments.evidence.bench.gpu.attention import attention_difference
from experiments.evidence.bench.gpu.watch import Watch
from experiments.evidence.bench.rows import EVERY_ROW, KINDS, SHAPES, BenchRow
from experiments.runs.stages import config_class

FOLDER = processes.REPOSITORY / "output" / "bench" / "gpu"
# Seconds of a case on an H100, with GPT-2 small and with GPT-2 large; three times, if it compiles
SECONDS = {"card": (10, 10), "check": (5, 5), "fixture": (15, 30), "ours": (7, 16)}
SECONDS |= {"levers": (8, 16), "trl": (60, 130), "decode": (6, 15)}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s in bfloat16, dense
FLAGS = {"bf16": "true", "micro_batch_tokens": 32768}
REFERENCE = "float32, padded"
OURS: dict[str, dict[str, Any]] = {
    REFERENCE: {"bf16": "false", "layout": "padded", "micro_batch_tokens": 4096},
    "plain": {},
    "compiled": {"compile": "true"},
}
# Compiled last, since accelerate keeps that in the environment; it takes minutes with GPT-2 large
EXTRAS = {"gpt2-small": ["use_liger_kernel", "torch_compile"], "gpt2-large": ["use_liger_kernel"]}
SHARDED = "FSDP"  # as in several processes
LEVERS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded"},
    SHARDED: {},
    "compiled, with CUDA graphs": {"compile": "reduce-overhead"},
}
LIMITS = {"bfloat16": 2e-2, "float32": 1e-4}  # of differences, shares of the largest value
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measurement, which gives a line, or a line for each of TRL's settings."""

    kind: str  # the part of the benchmark
    model: str = ""
    row: BenchRow | None = None
    variant: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique in a plan, for a file's name too."""
        words = [self.kind, self.model, self.row.stage if self.row else "", self.variant]
        return re.sub(r"\W+", "-", " ".join(filter(None, words)))

    @property
    def seconds(self) -> int:
        """About how long it takes on an H100."""
        return SECONDS[self.kind][self.model == "gpt2-large"] * (
            3 if "compile" in self.flags else 1
        )


def plan(models: Sequence[str], kinds: Sequence[str], rows: Sequence[BenchRow]) -> list[Case]:
    """The cases of these parts, in order."""
    cases, grpo = [Case("card"), *(Case("check", variant=name) for name in LIMITS)], rows[-1]
    for model in models:
        cases.append(Case("fixture", model))
        for variant, flags in OURS.items():  # what GRPO samples differs with the rounding
            some = rows[:-1] if variant == REFERENCE else rows
            cases += [Case("ours", model, row, variant, flags) for row in some]
    cases += [Case("trl", model, row) for model in models for row in rows]
    for variant, flags in LEVERS.items():
        cases += [Case("levers", models[0], row, variant, flags) for row in rows]
    cases.append(Case("levers", models[0], grpo, "no graphs", {"cuda_graphs": "false"}))
    for model, graphs, share in itertools.product(models, ("true", "false"), (2, 1)):
        size = grpo.num_rows * grpo.num_generations // share
        flags = {"generation_batch_size": size, "cuda_graphs": graphs}
        cases.append(Case("decode", model, grpo, f"{size} at once, graphs {graphs}", flags))
    chosen = [case for case in cases if case.kind in ("card", "fixture", *kinds)]
    used = {case.model for case in chosen if case.kind != "fixture"}
    return [case for case in chosen if case.model in used]


class Bench:
    """The measurements of one folder; `results` are its lines so far."""

    def __init__(self, folder: Path, *, is_tiny: bool) -> None:
        """Read the lines."""
        self.folder, self.is_tiny = folder, is_tiny
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.jsonl"
        self.results = read_jsonl(self.file)

    def write(self, case: Case, line: Line) -> None:
        """Add a line."""
        about = {"case": case.name, "part": case.kind, "model": case.model, "variant": case.variant}
        about |= {"stage": case.row.stage} if case.row else {}
        self.results.append(about | line)
        with self.file.open("a") as file:
            file.write(json_line(self.results[-1]))
        print(json_line(self.results[-1]), end="", flush=True)

    def measure(self, case: Case, seconds: float) -> None:
        """Write the lines of a case; an error, and too little time, are written too."""
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        try:
            signal.signal(signal.SIGALRM, stop)
            signal.alarm(math.ceil(min(seconds, 60 + 3 * case.seconds)))
            for line in getattr(self, f"measure_{case.kind}")(case):
                self.write(case, line | {"case_seconds": time.monotonic() - started})
        except Exception as error:  # the other cases go on
            traceback.print_exc()
            self.write(case, {"error": f"{type(error).__name__}: {gist(error)}"})
        finally:
            signal.alarm(0)

    def measure_card(self, case: Case) -> Iterator[Line]:
        """Name and versions; FLOP/s of a bfloat16 product, bytes/s of a copy."""
        device = distributed.device()
        names = ("torch", "transformers", "trl", "liger_kernel")
        width, num_bytes = (512, 2**22) if self.is_tiny else (8192, 2**31)
        factors = torch.randn(2, width, width, dtype=torch.bfloat16, device=device)
        flops_per_second = 2 * width**3 / median_seconds(lambda: factors[0] @ factors[1])
        rows = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
        copied = 2 * num_bytes / median_seconds(lambda: rows[0].copy_(rows[1]))
        about = environment.accelerator(1)
        peaks = [peak for name, peak in PEAKS.items() if name in str(about["gpu"])]
        yield {
            **about,
            "versions": environment.versions(names),
            "git_commit": environment.git_commit(),
            "matmul_flops": flops_per_second,
            "copy_bytes_per_second": copied,
            "peak_flops": peaks[0] if peaks else flops_per_second,
        }

    def measure_check(self, case: Case) -> Iterator[Line]:
        """The attention of shared prompts against a dense mask in float64."""
        dtype, line = getattr(torch, case.variant), {}
        for name, num_completions in (("pairs", 2), ("groups of 8", 8), ("runs", 1)):
            for is_tail in (False, True):
                lengths = (4, 48, 12) if self.is_tiny else (32, 384, 56)
                difference = attention_difference(num_completions, dtype, is_tail, lengths)
                line[name + ", tails" * is_tail] = difference
        yield line | {"is_right": all(value <= LIMITS[case.variant] for value in line.values())}

    def measure_fixture(self, case: Case) -> Iterator[Line]:
        """Make models and texts: on the GPU, which takes seconds, or else on the CPU."""
        line = {}
        try:
            with distributed.device():
                fixture.build(case.model, self.folder / case.model)
        except RuntimeError as error:
            line = {"error_on_gpu": gist(error)}
            fixture.build(case.model, self.folder / case.model)
        yield line

    def measure_ours(self, case: Case) -> Iterator[Line]:
        """A stage in this process."""
        row, output = case.row, self.folder / "runs" / case.name
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        num_steps = 1 if case.variant == REFERENCE else row.steps + 1
        flags = FLAGS | case.flags
        if row.stage == "grpo":
            flags = {"generation_batch_size": row.num_rows * row.num_generations} | flags
        texts = self.folder / case.model
        script, *words = sides.our_command(row, texts, num_steps, output, more=flags)
        main, watch = importlib.import_module(script.removesuffix(".py")).main, Watch(row.steps)
        backend, failed = {"backend": "eager"} if self.is_tiny else {}, {}
        shard = shard_in_one if case.variant == SHARDED else fsdp.shard
        with (
            (output / "log.txt").open("w") as log,
            redirect_stdout(log),
            redirect_stderr(log),
            mock.patch.object(torch, "compile", partial(torch.compile, **backend)),
            mock.patch.object(fsdp, "shard", shard),
            watch.steps_of_runs(),
        ):
            try:
                main(parse(config_class(script), words))
            except Exception as error:
                if len(watch.wall_seconds) < row.steps:
                    raise
                failed = {"profile_error": gist(error)}  # of the last step: the times count
        peak = distributed.peak_memory_gb()
        steps = [line for line in run_folder.read_metrics(output) if "step_seconds" in line]
        line = failed | {n: steps[0].get(n) for n in ("loss", "grad_norm", "sampler_kl")}
        if num_steps > 1:
            timed = range(row.warmup, row.steps)
            timed = [i for i in timed if not watch.compiled[i]] or timed
            names = ("step_seconds", *PHASES, "completion_length")
            line |= {n: median(steps[i][n] for i in timed) for n in names if n in steps[0]}
            seconds = [watch.wall_seconds[i] for i in timed]
            line |= self.speed(case, seconds, line.get("completion_length", 0.0)) | vars(watch)
        yield line | self.differences(case, line) | {"peak_gb": peak}

    measure_levers = measure_decode = measure_ours

    def measure_trl(self, case: Case) -> Iterator[Line]:
        """TRL at three micro-batches, and at the fastest with each extra."""
        row, output = case.row, self.folder / "runs" / f"{case.name}.jsonl"
        together = row.num_rows * max(1, row.num_generations)
        output.unlink(missing_ok=True)
        sizes = sorted({max(1, together // n) for n in (4, 2, 1)})
        words = sides.trl_command(row, self.folder / case.model, row.steps, output)
        words += ["--sizes", *map(str, sizes), "--extras", *EXTRAS.get(case.model, [])]
        shown = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        try:
            log, threads = output.with_suffix(".log"), torch.get_num_threads()
            processes.run(words, log, threads=threads, more_environment=shown)
        finally:
            for line in read_jsonl(output):
                if "step_seconds" in line:
                    seconds = line.pop("step_seconds")[row.warmup :]
                    line |= self.speed(case, seconds, line.get("completion_length", 0.0))
                    line |= self.differences(case, line)
                yield line

    def speed(self, case: Case, seconds: Sequence[float], completion_length: float) -> Line:
        """Median seconds of a step, what it makes per second, and its share of the card's peak."""
        row, stamp = case.row, run_folder.read_config(self.folder / case.model, "fixture.json")
        lengths, step = stamp["lengths"][row.data_name], median(seconds)
        work = flops.step_flops(row, SHAPES[case.model], lengths, completion_length)
        card = next((line for line in self.results if "peak_flops" in line), {})
        return {
            "seconds": step,
            "per_second": flops.step_units(row, lengths) / step,
            "share": work / step / card.get("peak_flops", math.nan),
        }

    def differences(self, case: Case, line: Line) -> Line:
        """First loss and gradient norm minus those of the padded layout in float32."""
        sought = case.model, case.row.stage, REFERENCE
        for one in self.results:
            if (one["model"], one.get("stage"), one["variant"]) == sought and "loss" in one:
                return {f"{n}_difference": line[n] - one[n] for n in ("loss", "grad_norm")}
        return {}


def shard_in_one(*args: Any, shard: Any = fsdp.shard, **options: Any) -> Any:
    """`fsdp.shard` as in several processes: in one it leaves the module plain."""
    with mock.patch.object(distributed, "world_size", return_value=2):
        return shard(*args, **options)


def stop(*_: Any) -> None:
    """Interrupt a case that takes too long."""
    raise TimeoutError("it was stopped: it took too long")


def table(results: Sequence[Line]) -> str:
    """TRL's best and ours of every model and stage, and which they are."""
    card = next((line for line in results if "peak_flops" in line), {})
    share = f"share of {card.get('peak_flops', math.nan) / 1e12:.3g} TFLOP/s"
    heads = ["", "", "TRL", "ours", "ratio", share, "GB TRL / ours", "settings TRL / ours"]
    rows = []
    for model, stage in itertools.product(SHAPES, KINDS):
        of_row = [r for r in results if (r["model"], r.get("stage")) == (model, stage)]
        best = []
        for side in sides.SIDES:
            timed = [r for r in of_row if r["part"] == side and "per_second" in r]
            best.append(max(timed, key=lambda r: r["per_second"], default={}))
        if not any(best):
            continue
        speeds, peaks = ([s.get(n, math.nan) for s in best] for n in ("per_second", "peak_gb"))
        cells = [*(f"{x:,.4g}" for x in speeds), f"{speeds[1] / speeds[0]:.1f}"]
        cells += [f"{best[1].get('share', math.nan):.0%}", "{:.0f} / {:.0f}".format(*peaks)]
        settings = " / ".join(side.get("variant", "nan") for side in best)
        rows.append([model, f"{stage}, {EVERY_ROW[f'gpu-{stage}'].unit}", *cells, settings])
    about = [f"{name} {version}" for name, version in card.get("versions", {}).items()]
    note = f"{card.get('gpu')}, {', '.join(about)}, commit {card.get('git_commit')}"
    text = f"{markdown.table(heads, rows)}\n\n{note}"
    return text.replace("nan%", NOT_MEASURED).replace("nan", NOT_MEASURED)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["check", "ours", "levers", "trl", "decode"]
    models = ["gpt2-small", "gpt2-large"]
    parser.add_argument("--parts", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--minutes", type=float, default=9.0, help="no case may take longer")
    parser.add_argument("--tiny", action="store_true", help="by a tiny model, also on a CPU")
    parser.add_argument("--resume", action="store_true", help="keep the lines that are there")
    return parser.parse_args()


def main() -> None:
    """Measure the cases that there is time for, and print the table."""
    started, arguments = time.monotonic(), parse_arguments()
    size, models = ("tiny", ["tiny"]) if arguments.tiny else ("gpu", arguments.models)
    cases = plan(models, arguments.parts, [EVERY_ROW[f"{size}-{s}"] for s in KINDS])
    bench = Bench(FOLDER / "tiny" if arguments.tiny else FOLDER, is_tiny=arguments.tiny)
    if not arguments.resume:
        bench.file.unlink(missing_ok=True)
        bench.results.clear()
    distributed.start()
    measure_all(bench, cases, started + 60 * arguments.minutes)
    torch.distributed.destroy_process_group()
    (bench.folder / "table.md").write_text(table(bench.results) + "\n")
    print(f"\n{table(bench.results)}")


def measure_all(bench: Bench, cases: Sequence[Case], deadline: float) -> None:
    """Measure cases without a line until the deadline, in a new process if the GPU was lost."""
    done = {line["case"] for line in bench.results if "skipped" not in line}
    for case in cases:
        left = deadline - time.monotonic()
        if case.kind != "fixture" and case.name in done:
            continue
        if left < case.seconds:
            bench.write(case, {"skipped": f"{left:.0f} of about {case.seconds} s are left"})
            continue
        bench.measure(case, left)
        try:
            timer()  # which waits for the GPU
        except RuntimeError:  # after an illegal access nothing runs in this process
            if case.kind in ("card", "fixture"):
                raise
            more = ["--resume", f"--minutes={(deadline - time.monotonic()) / 60}"]
            words = ["-m", "experiments.evidence.bench.gpu", *sys.argv[1:], *more]
            os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
