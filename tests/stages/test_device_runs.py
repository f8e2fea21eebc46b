"""What a run does beside its steps, on a device that is not the CPU (`tests/sim_device.py`).

- A step that goes bad names the rows that it names on the CPU.
- A run that goes on from a checkpoint is the one that never stopped, to the bit.
- An evaluation finds what it finds on the CPU, up to rounding: accuracies, rewards, win rates.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import flag, launch, run_stages, untimed_lines
from safetensors.torch import load_file
from sim_device import on_sim, set_up
from test_device import COMMON, VARIANTS

import evaluate
from common.checkpoint import layout
from common.config.parser import parse
from common.model import optim
from common.report import evaluation_report

LONG = 64  # tokens, of which the rows of a bad step have more
STEPS, SAVED = 4, 2
MOVES: dict[str, dict[str, Any]] = {"sft": {}, "grpo": VARIANTS["grpo exact"]}


def run_all(jobs: Sequence[dict[str, Any]], *, simulated: bool) -> list[str]:
    """Run stages, evaluations, and stages whose second step is spoilt: what these say."""
    if simulated:
        set_up()
    said = []
    for job in jobs:
        with on_sim() if simulated else contextlib.nullcontext():
            if job["stage"] == "evaluate":
                arguments = [
                    text for key, value in job["flags"].items() for text in flag(key, value)
                ]
                with mock.patch.object(evaluation_report, "write_report"):  # pictures
                    evaluate.main(parse(evaluate.EvaluateConfig, arguments))
            elif job.get("is_spoilt"):
                said.append(sentence_of(job))
            else:
                run_stages([job])
    return said


def sentence_of(job: dict[str, Any]) -> str:
    """Run a stage whose weights and loss are NaN for long rows from the second update on."""
    step = optim.clip_and_step

    def spoil(module: Any, *args: Any) -> dict[str, Any]:
        if args[2] == 1:
            with torch.no_grad():
                module.lm.transformer.wpe.weight[LONG:] = torch.nan
            return step(module, *args[:-1], args[-1] * torch.nan)
        return step(module, *args)

    with mock.patch.object(optim, "clip_and_step", spoil), pytest.raises(RuntimeError) as caught:
        run_stages([job])
    return str(caught.value)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> tuple[Path, dict[str, list[str]]]:
    """The folder of all runs, in `cpu/` and `sim/`, and what the spoilt ones said there."""
    folder = tmp_path_factory.mktemp("runs")
    trained = {name: str(folder / "cpu" / name / "model") for name in ("sft", "reward")}

    def job(stage: str, name: str, start: str | Path, **flags: Any) -> dict[str, Any]:
        known = {"output_dir": str(folder / name), "model_name_or_path": str(start)}
        known |= {"tokenizer_name_or_path": str(tokenizer_folder)}
        shared = COMMON
        if stage == "evaluate":
            known_here = {f.name for f in fields(evaluate.EvaluateConfig)}
            shared = {name: COMMON[name] for name in COMMON if name in known_here}
            flags = {"policies": [trained["sft"]], "reward_models": [trained["reward"]]}
            flags |= {"reward_funcs": ["gold"], "num_prompts": 4}
        return {"stage": stage, "flags": shared | flags | known}

    def on(device: str) -> list[dict[str, Any]]:
        found = []
        for name, more in MOVES.items():
            bad, whole, resumed = (
                f"{device}/{kind} {name}" for kind in ("bad", "whole", "resumed")
            )
            found.append(job(name, bad, trained["sft"], **more) | {"is_spoilt": True})
            known = more | {"max_steps": STEPS, "save_steps": SAVED, "eval_steps": 0}
            found.append(job(name, whole, trained["sft"], **known))
            known |= {"resume_from_checkpoint": str(layout.folder_of(folder / whole, SAVED))}
            found.append(job(name, resumed, trained["sft"], **known))
        return [*found, job("evaluate", f"{device}/evaluation", trained["sft"])]

    first = [job("sft", "cpu/sft", tiny_gpt2)]
    first.append(job("reward", "cpu/reward", trained["sft"]))
    said = {}
    for device, jobs in (("cpu", first + on("cpu")), ("sim", on("sim"))):
        (said[device],) = launch(run_all, 1, folder, jobs=jobs, simulated=device == "sim")
    return folder, said


@pytest.mark.parametrize("number", range(len(MOVES)))
def test_a_bad_step_names_its_rows(runs: Any, number: int) -> None:
    on_cpu, there = (
        re.search(r"the loss of 1 ranks .* those of \d+ rows, [^.]+\.", said[number])
        for said in runs[1].values()
    )
    assert on_cpu
    assert there
    assert there[0] == on_cpu[0]


@pytest.mark.parametrize("name", MOVES)
def test_a_resumed_run_is_the_run_that_never_stopped(runs: Any, name: str) -> None:
    whole, resumed = (runs[0] / "sim" / f"{kind} {name}" for kind in ("whole", "resumed"))
    lines = untimed_lines(whole)
    assert {line["step"] for line in lines} == set(range(1, STEPS + 1))
    assert untimed_lines(resumed) == [line for line in lines if line["step"] > SAVED]
    weights, again = (load_file(run / "model" / "model.safetensors") for run in (whole, resumed))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_an_evaluation_finds_the_same(runs: Any) -> None:
    there, on_cpu = (
        json.loads((runs[0] / device / "evaluation" / "results.json").read_text())
        for device in ("sim", "cpu")
    )
    assert [system["name"] for system in there["systems"]] == ["sft", "reward"]
    for key in ("systems", "win_rates", "comparison"):
        found, expected = (dict(numbers(results[key])) for results in (there, on_cpu))
        assert len(found) > 1
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in lists and dictionaries, but for timings, by where they stand."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{path}/{key}")
    elif isinstance(value, int | float) and not path.endswith(("minutes", "memory_gb")):
        yield path, value
