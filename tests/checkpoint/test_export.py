"""A checkpoint becomes a plain folder by a command, and wherever a flag names one as a model.

That the folder is the run's own is shown where there are whole runs: `test_resume.py`,
`test_lora.py`. About `common.checkpoint.export` and `common.checkpoint.hf_folder`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import distributed
from common.checkpoint import export, hf_folder, layout
from common.checkpoint.checkpointer import Checkpointer
from common.config.grpo import GRPOConfig
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, optim
from common.record.metrics import Accumulator

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    run = tmp_path_factory.mktemp("run")
    config = tiny.train_config(output_dir=str(run), keep_last=0, async_save=False)
    policy = fsdp.shard(Policy(tiny.causal_lm("gpt2", vocab_size=300)), config, distributed.mesh())
    policy.lm.config.use_cache = False
    settings = export.settings_of(policy.lm, tiny.vocabulary([5, 0]))
    optimizer = optim.build_optimizer(policy, config)
    metrics = Accumulator(distributed.device())
    saver = Checkpointer(config, policy, optimizer, metrics, settings=settings)
    for step in (1, 2):
        saver.save(step)
    saver.close()
    return run


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_run, tmp_path / "run")


def test_a_checkpoint_named_as_a_model_is_exported_into_it_once(run: Path) -> None:
    newest, before = layout.newest_first(run)
    for is_there in (False, True):
        config = GRPOConfig(
            output_dir="unused",
            model_name_or_path=str(newest),
            reward_funcs=["gold", str(before)],
            ref_model_name_or_path=str(before),
            resume_from_checkpoint=str(before),
        )
        config = hf_folder.with_folders(config)
        assert config.model_name_or_path == str(newest / "model")
        assert config.ref_model_name_or_path == str(before / "model")
        assert config.reward_funcs == ["gold", str(before / "model")]
        assert config.resume_from_checkpoint == str(before)
        assert (newest / "model" / "seen").exists() == is_there
        (newest / "model" / "seen").touch()
    lm = AutoModelForCausalLM.from_pretrained(newest / "model")
    expected = tiny.causal_lm("gpt2", vocab_size=300, is_plain=True).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in lm.state_dict().items())
    assert lm.generation_config.eos_token_id == [5, 0]
    assert lm.generation_config.pad_token_id == tiny.tokenizer().pad_token_id
    assert lm.config.use_cache  # off in training
    assert len(AutoTokenizer.from_pretrained(newest / "model")) == len(tiny.tokenizer())
    assert layout.damage(newest) == ""  # it can still be resumed from
    layout.remove_old(run, 1)
    assert not before.exists()  # with its model


def test_of_two_commands_one_waits_for_the_other_s_export(run: Path) -> None:
    newest = layout.newest_first(run)[0]
    code = "import filelock, os, time; lock = filelock.FileLock('.lock'); lock.acquire(); "
    code += "print('mine', flush=True); time.sleep(1); os.mkdir('model')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=newest, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert hf_folder.exported(newest, tiny.train_config()) == str(newest / "model")
    assert other.returncode == 0
    assert list((newest / "model").iterdir()) == []


def test_a_manifest_of_another_tool_makes_no_folder_a_checkpoint(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("model", "data")]
    for folder, manifest in zip(folders, ("[]", '{"files": {}}'), strict=True):
        folder.mkdir()
        (folder / "manifest.json").write_text(manifest)
    names = {"model_name_or_path": str(folders[0]), "dataset_name": str(folders[1])}
    assert hf_folder.with_folders(config := tiny.train_config(**names)) == config


def test_what_is_no_checkpoint_or_damaged_is_refused(run: Path) -> None:
    newest = layout.newest_first(run)[0]
    (newest / "settings" / "config.json").write_text("{}")
    reason = "settings/config.json does not have its checksum"
    with pytest.raises(UserError, match=f"{newest} cannot be read: {reason}"):
        hf_folder.with_folders(tiny.train_config(model_name_or_path=str(newest)))
