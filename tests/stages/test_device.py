"""Claims about GPUs that need none: stages and options run on a device that is not the CPU.

No tensor of the host meets one of the device; losses and gradient norms are the CPU's up to
rounding (other kernels compute them); and the host waits for the device no more often than a table
says, by the file that asks for it (`tests/sim_device.py`). No GPU was there.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import launch, run_stages, untimed_lines
from sim_device import run_simulated

COMMON = {
    "dataset_name": "synthetic",
    "num_train_rows": 12,
    "num_eval_rows": 4,
    "num_sample_prompts": 2,
    "max_prompt_length": 128,
    "max_completion_length": 12,
    "batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 1e-3,
    "max_steps": 2,
    "logging_steps": 1,
    "eval_steps": 2,
}
GRPO = {
    "eval_steps": 0,
    "temperature": 0.7,
    "num_candidates": 4,
    "num_generations": 3,
    "reward_funcs": ["gold"],
    "missing_eos_penalty": -0.2,
    "beta": 0.05,
}
EXACT = {"kl_estimator": "full", "ref_update_steps": 1, "num_minibatches": 2}
LORA = {"lora_r": 2, "kl_in": "reward", "baseline": "kept", "kl_estimator": "k1"}
VARIANTS: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft padded": {"layout": "padded"},
    "reward": {"sft_dataset_name": "synthetic", "num_sft_rows": 9},
    "dpo": {},
    "dpo lora": {"lora_r": 2, "eval_steps": 0},
    "grpo": GRPO | {"num_iterations": 2, "reward_funcs": ["REWARD MODEL", "gold"]},
    "grpo exact": GRPO | EXACT,
    "grpo resample": GRPO | {"zero_variance": "resample", "aggregation": "prompt"},
    "grpo lora": GRPO | LORA | {"sampler_correction": "token_truncate"},
    "grpo padded": GRPO | {"layout": "padded", "entropy_coef": 0.01, "top_p": 0.9},
}

# Of nine runs of two steps, which train on 38 batches and sample about 300 tokens one by one.
WAITS = {
    "common/distributed.py": 10,
    "common/evaluation/score.py": 112,
    "common/grpo/minibatches.py": 2,
    "common/grpo/monitor.py": 24,
    "common/model/optim.py": 22,
    "common/pairs/reference.py": 8,
    "common/record/metrics.py": 18,
    "common/rewards/models.py": 19,
    "common/sampling/decode.py": 306,
    "common/sampling/shared.py": 40,
    "common/scoring.py": 178,
    "train_reward.py": 2,
}
ONCE = {
    "common/checkpoint/export.py",
    "common/model/fsdp.py",
    "common/sampling/token_records.py",
    "common/self_checks.py",
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> tuple[Path, dict[str, dict[str, int]]]:
    """The folder of all runs, `cpu/` and `sim/`, and the waits of the simulated ones."""
    folder = tmp_path_factory.mktemp("device")

    def jobs(device: str, names: Any) -> list[dict[str, Any]]:
        found = []
        for name in names:
            stage = name.split()[0]
            start = tiny_gpt2 if stage == "sft" else folder / "cpu" / "sft" / "model"
            flags = COMMON | VARIANTS[name] | {"output_dir": str(folder / device / name)}
            flags |= {"model_name_or_path": str(start)}
            flags |= {"tokenizer_name_or_path": str(tokenizer_folder)}
            if "REWARD MODEL" in flags.get("reward_funcs", ()):
                flags["reward_funcs"] = [str(folder / "cpu" / "reward" / "model"), "gold"]
            found.append({"stage": stage, "flags": flags})
        return found

    launch(run_stages, 1, folder, jobs=jobs("cpu", VARIANTS))
    (waits,) = launch(run_simulated, 1, folder, jobs=jobs("sim", VARIANTS))
    return folder, dict(zip(VARIANTS, waits, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_device_computes_what_the_cpu_does(runs: Any, name: str) -> None:
    lines, expected = (untimed_lines(runs[0] / device / name) for device in ("sim", "cpu"))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, own in zip(lines, expected, strict=True):
        for metric in {"loss", "grad_norm", "eval_loss", "reward"} & own.keys():
            assert line[metric] == pytest.approx(own[metric], rel=1e-4, abs=1e-6), metric


def test_the_host_waits_no_more_often_than_this(runs: Any) -> None:
    """But for what a run does once, and for resampling, whose rounds are by chance."""
    found: Counter[str] = Counter()
    for name in VARIANTS.keys() - {"grpo resample"}:
        for line, count in runs[1][name].items():
            found[line.split(":")[0]] += count
    counted = found.keys() - ONCE
    assert {file: found[file] for file in counted if found[file] > WAITS.get(file, 0)} == {}
