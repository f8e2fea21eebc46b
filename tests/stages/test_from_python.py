"""Claim: from Python, as in a notebook, stages and evaluation run one after another in a process.

Nothing is launched before. About `common.distributed` and `common.config.flags`.
"""

import json
import re
from pathlib import Path

import pytest
import tiny
from ranks import ROOT, Script
from transformers import AutoTokenizer

PAGE = (ROOT / "docs" / "experiment.md").read_text().partition("## From Python")[2]
BLOCK = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[0]
CELLS = f"""
import evaluate, train_dpo, train_grpo, train_reward, train_sft
from common.report import plots

plots.plot_run = lambda folder: []
START = "output/demo/sft/model"
SMALL = dict(model_name_or_path=START, num_train_rows=4, num_eval_rows=2, batch_size=2, max_steps=1)
SMALL |= dict(max_prompt_length=96, max_completion_length=16, max_dropped_fraction=1.0)
of_page, train_dpo.DPOConfig = train_dpo.DPOConfig, lambda **flags: of_page(**SMALL | flags)
{BLOCK}
train_dpo.main(train_dpo.DPOConfig(output_dir="output/simpo", loss_type="simpo"))
train_sft.main(train_sft.SFTConfig(output_dir="output/sft", **SMALL))
train_reward.main(train_reward.RewardConfig(output_dir="output/reward", **SMALL))
few = dict(reward_funcs="gold", num_generations=2)
train_grpo.main(train_grpo.GRPOConfig(output_dir="output/grpo", **few, **SMALL))
for _ in range(2):
    sizes = dict(num_eval_rows=2, num_prompts=2, max_prompt_length=96, max_completion_length=16)
    evaluate.main(evaluate.EvaluateConfig(output_dir="output/eval", policies=START, **sizes))
"""


def test_the_lines_of_the_page_and_every_stage_run_in_one_process(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    start = tmp_path / "output/demo/sft/model"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    lm = tiny.causal_lm("gpt2", is_plain=True, vocab_size=len(tokenizer), n_positions=192)
    lm.save_pretrained(start)
    tokenizer.save_pretrained(start)
    (tmp_path / "notebook.py").write_text(CELLS)
    monkeypatch.chdir(tmp_path)
    script = Script([tmp_path / "notebook.py"], tmp_path / "log.txt")
    assert script.wait(120) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    for run in ("mine", "simpo", "sft", "reward", "grpo"):
        assert (tmp_path / "output" / run / "model" / "model.safetensors").exists(), run
    results = json.loads((tmp_path / "output/eval/results.json").read_text())
    assert results["num_prompts"] == 2
