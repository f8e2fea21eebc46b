"""Claim: the objectives that docs/objectives.md has by name run with the flags that it shows.

A student that is distilled on its own samples comes nearer to its teacher, a larger model with the
same tokenizer; the KL is that of transformers' logits. Another tokenizer is refused. About
`train_grpo` and `train_dpo`.
"""

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from ranks import SHORT_RUN, launch, run_stages, untimed_lines
from transformers import AutoModelForCausalLM

import train_grpo
from common.errors import UserError
from common.grpo.rollouts import Groups
from tests.variants import REWARD_FILE, stopping_model_job

pytestmark = pytest.mark.usefixtures("process_group")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (
    (ROOT / "docs" / "objectives.md")
    .read_text()
    .partition("## Names in papers")[2]
    .partition("\n## ")[0]
)
ROWS = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)`", PAGE, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path) -> Path:
    """A folder with a tiny model that has learned to stop, a larger one, and a reward function."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "rewards.py").write_text(REWARD_FILE)
    larger = folder / "larger.json"
    larger.write_text(json.dumps(json.loads(tiny_gpt2.read_text()) | {"n_embd": 64}))
    jobs = [
        stopping_model_job(folder / "base", tiny_gpt2, tokenizer_folder),
        stopping_model_job(folder / "larger", larger, tokenizer_folder, seed=1),
    ]
    launch(run_stages, 1, folder, jobs=jobs)
    return folder


def run_flags(base: Path, output_dir: Path, stage: str) -> dict[str, Any]:
    """Flags of a short run from the smaller model; the reference is the larger one."""
    flags: dict[str, Any] = SHORT_RUN | {
        "model_name_or_path": str(base / "base" / "model"),
        "ref_model_name_or_path": str(base / "larger" / "model"),
        "output_dir": str(output_dir),
        "dataset_test_split": "",
        "max_completion_length": 24,
        "max_steps": 2,
    }
    if stage == "dpo":
        flags["num_train_rows"] = 100
    else:
        flags |= {"reward_funcs": f"{base}/rewards.py:letters", "num_generations": 4}
    return flags


def test_every_row_of_the_page_is_read():
    assert len(ROWS) == PAGE.count("\n| ") - 1 > 0  # without the head


@pytest.mark.parametrize("name", ROWS)
def test_a_name_s_flags_run(base: Path, tmp_path: Path, name: str):
    stage = "dpo" if ROWS[name].startswith("train_dpo.py ") else "grpo"
    flags = run_flags(base, tmp_path / "run", stage)
    words = re.findall(r"--(\w+) ([^-]\S*(?: [^-]\S*)*)", ROWS[name])
    run_stages([{"stage": stage, "flags": flags | {key: text.split() for key, text in words}}])
    lines = untimed_lines(tmp_path / "run")
    assert len(lines) == 2
    assert all(line["grad_norm"] > 0 for line in lines)


def test_a_student_comes_nearer_to_a_larger_teacher(base: Path, tmp_path: Path):
    flags = run_flags(base, tmp_path / "run", "grpo") | {
        "beta": 1.0,
        "kl_estimator": "full",
        "reward_weights": 0.0,
        "max_steps": 25,
    }
    steps: list[Groups] = []
    select = train_grpo.rollouts.select

    def recorded(groups: Groups, *arguments: Any) -> Any:
        steps.append(groups)
        return select(groups, *arguments)

    with mock.patch.object(train_grpo.rollouts, "select", recorded):
        run_stages([{"stage": "grpo", "flags": flags}])
    folders = (base / "base" / "model", base / "larger" / "model")
    student, teacher = map(AutoModelForCausalLM.from_pretrained, folders)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    prompts = [e.prompt_ids for e in steps[0].examples for _ in range(4)]
    rows = list(zip(prompts, steps[0].rollouts.completion_ids, strict=True))
    with torch.no_grad():
        expected, reached = (
            [tiny.enumerated_kl(lm, teacher, *row).sum().item() for row in rows]
            for lm in (student, trained)
        )
    kl = [line["kl"] for line in untimed_lines(tmp_path / "run")]
    assert kl[0] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    # On the same texts, and by the median: one rare token has most of a mean
    assert statistics.median(reached) < statistics.median(expected) / 2


@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_a_reference_with_another_tokenizer_is_refused(base: Path, tmp_path: Path, stage: str):
    shutil.copytree(base / "larger" / "model", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    text = file.read_text()
    swapped = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    assert swapped != text
    file.write_text(swapped)
    flags = run_flags(base, tmp_path / "run", stage)
    flags["ref_model_name_or_path"] = str(tmp_path / "other")
    with pytest.raises(UserError, match="has another tokenizer than"):
        run_stages([{"stage": stage, "flags": flags}])


def test_the_exact_kl_needs_a_teacher_with_all_ids_of_the_student(base: Path, tmp_path: Path):
    lm = AutoModelForCausalLM.from_pretrained(base / "base" / "model")
    lm.resize_token_embeddings(lm.config.vocab_size + 6)
    flags = run_flags(base, tmp_path / "run", "grpo") | {"kl_estimator": "full"}
    flags["model_name_or_path"] = str(tmp_path / "student")
    flags["tokenizer_name_or_path"] = str(base / "base" / "model")
    lm.save_pretrained(tmp_path / "student")
    with pytest.raises(UserError, match=r"embeddings and the policy has \d+; with --kl_estimator"):
        run_stages([{"stage": "grpo", "flags": flags}])
