"""Tables of samples, and the sections that a report makes of them.

What a reward function logs is in the tables, and recorded as the mean of its calls, whichever ranks
call. About `common.report.sections`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import SHORT_RUN, launch, run_stages

from common.record.jsonl import read_jsonl
from common.report.blocks import Completion
from common.report.sections import (
    MOST_COMPLETIONS,
    MOST_FRAMES,
    completions_section,
    run_sections,
    training_browser,
)

pytestmark = pytest.mark.usefixtures("process_group")


COMMON = SHORT_RUN | {
    "dataset_test_split": "",
    "num_sample_prompts": 2,
    "num_train_rows": 8,
    "max_completion_length": 24,
    "sample_steps": 1,
    "max_steps": 2,
    "learning_rate": 0.01,
    "warmup_steps": 0,
}
JUDGE = """
import os

def judge(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    rank, step = int(os.environ.get("RANK", "0")), trainer_state.global_step
    log_metric("number", len(prompts))
    if rank == 0 and step % 2 == 1:  # a name that the other rank never hears of
        log_metric("rare", step)
        log_metric("loss", 100.0)  # a name of ours: it does not reach our loss
    log_extra("tokens", [len(ids) for ids in completion_ids])
    return [len(set(text)) / 10 for text in completions]
"""
PROMPTS = [*"aaabacaa"]  # of the pairs
STAGES = {
    "grpo": {"num_generations": 3, "beta": 0.1, "logging_steps": 2},
    "dpo": {"beta": 0.1},
    "sft": {},
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str], process_group: None
) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("records")
    (folder / "judge.py").write_text(JUDGE)
    pairs = [{"prompt": p, "chosen": f" {n} b", "rejected": " a"} for n, p in enumerate(PROMPTS)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def job(stage: str, number: int) -> dict[str, Any]:
        flags = COMMON | start_flags | STAGES[stage] | {"output_dir": folder / str(number) / stage}
        if stage == "grpo":
            flags |= {"reward_funcs": f"{folder}/judge.py:judge"}
        if stage == "dpo":
            flags |= {"dataset_name": folder / "pairs.jsonl"}
        return {"stage": stage, "flags": {name: str(value) for name, value in flags.items()}}

    jobs = {number: [job(stage, number) for stage in STAGES] for number in (1, 2)}
    run_stages(jobs[1])
    launch(run_stages, 2, folder, jobs=jobs[2])
    return {number: folder / str(number) for number in (1, 2)}


def test_the_number_of_ranks_changes_no_record(runs: dict[int, Path]) -> None:
    for stage in STAGES:
        one, two = (read_jsonl(runs[number] / stage / "samples.jsonl") for number in (1, 2))
        assert len(one) == len(two) > 0
        for here, there in zip(one, two, strict=True):
            assert here.keys() == there.keys()
            for name, value in here.items():
                if name != "advantage":
                    assert value == there[name], (stage, name)


def test_a_prompt_of_several_pairs_is_shown_once(runs: dict[int, Path]) -> None:
    shown = [row["prompt"] for row in read_jsonl(runs[1] / "dpo" / "samples.jsonl")]
    assert shown == 2 * ["a", "b"]  # at both steps


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_reward_function_logs_is_recorded(runs: dict[int, Path], num_ranks: int) -> None:
    (line,) = read_jsonl(runs[num_ranks] / "grpo" / "metrics.jsonl")  # of both steps
    assert line["logged/number"] == 12 / num_ranks
    assert line["logged/rare"] == 1
    assert line["logged/loss"] == 100
    assert abs(line["loss"]) < 1
    for row in read_jsonl(runs[num_ranks] / "grpo" / "samples.jsonl"):
        assert 1 <= row["logged/tokens"] <= 24


def test_samples_are_grouped_by_prompt_and_step_with_completions_or_pairs() -> None:
    rows = [
        {"step": step, "prompt": prompt, "completion": f"{prompt}{step}{k}", "reward": k / 4}
        for step in (5, 10)
        for prompt in "ab"
        for k in range(2)
    ]
    browser = training_browser(rows)
    assert [sample.prompt for sample in browser.samples] == ["a", "b"]
    assert list(browser.samples[1].frames) == ["step 5", "step 10"]
    assert browser.samples[1].frames["step 10"] == [
        Completion("completion 1", "b100", "reward 0"),
        Completion("completion 2", "b101", "reward 0.25"),
    ]
    scores = {"chosen score": 1.5, "rejected score": -0.25}
    row = {"step": 1, "prompt": "p", "chosen": "good", "rejected": "", **scores}
    (sample,) = training_browser([row]).samples
    assert sample.frames["step 1"] == [
        Completion("chosen", "good", "score 1.5"),
        Completion("rejected", "", "score -0.25"),
    ]


def test_long_runs_are_shortened_and_the_caption_says_so() -> None:
    rows = [
        {"step": step, "prompt": "p", "completion": str(k)} for step in range(50) for k in range(20)
    ]
    browser = training_browser(rows)
    frames = browser.samples[0].frames
    assert len(frames) == MOST_FRAMES
    assert list(frames) == [f"step {step}" for step in (0, 7, 14, 21, 28, 35, 42, 49)]
    assert len(frames["step 0"]) == MOST_COMPLETIONS
    assert f"{MOST_FRAMES} of the 50 steps" in browser.caption
    assert f"first {MOST_COMPLETIONS} completions" in browser.caption


def test_a_chain_s_runs_become_sections(runs: dict[int, Path]) -> None:
    folders = {stage: runs[1] / stage for stage in STAGES} | {"none": runs[1] / "none"}
    (section,) = run_sections(folders)
    assert [inner.title for inner in section.blocks] == ["grpo", "dpo", "sft"]
    assert run_sections({"none": runs[1] / "none"}) == []
    browser = section.blocks[1].blocks[0]
    (first, *_) = browser.samples[0].frames.values()
    assert [each.label for each in first] == ["completion"]


def test_completions_come_from_the_evaluation_s_own_file(tmp_path: Path) -> None:
    reference = {"completion": "a reference", "num_tokens": 3, "stopped": True}
    reference |= {"rewards": {"gold": 1.0}}
    generated = {"completion": "made", "num_tokens": 4, "stopped": False, "kl": 2.25}
    generated |= {"rewards": {"gold": None, "rm": 0.5}}
    line = {"id": 0, "prompt": "p", "reference": reference, "systems": {"SFT": generated}}
    line |= {"verdicts": [], "further": {}}
    (tmp_path / "completions.jsonl").write_text(json.dumps(line) + "\n")
    (section,) = completions_section(tmp_path)
    assert section.blocks[0].samples[0].frames[""] == [
        Completion("reference", "a reference", "gold 1, 3 tokens, stopped by stop token"),
        Completion("SFT", "made", "rm 0.5, KL 2.25, 4 tokens, stopped by length limit"),
    ]
    assert completions_section(tmp_path / "none") == []
