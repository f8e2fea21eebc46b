"""Shards are the files that torch's own writer makes, on any number of ranks, without a copy.

About `common.checkpoint.sharded_state`.
"""

import gc
import json
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from ranks import launch, local
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from common import distributed
from common.checkpoint import layout, sharded_state
from common.forward import Policy, RewardModel
from common.model import fsdp, optim

PROC = Path("/proc/self")


def save_both_ways(into: str) -> None:
    """A reward model after a step, saved by our writer and by torch's; loads what torch's wrote."""
    config = tiny.train_config()
    model = RewardModel(tiny.classifier("gpt2"))
    for dtype in (torch.bool, torch.int64, torch.bfloat16):  # some models have such, as tables
        model.register_buffer(str(dtype).replace(".", "_"), torch.arange(3).to(dtype))
    model = fsdp.shard(model, config, distributed.mesh())
    optimizer = optim.build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    for name in ("ours", "torch"):
        writer = HuggingFaceStorageWriter if name == "torch" else sharded_state.ShardWriter
        with mock.patch.object(sharded_state, "ShardWriter", writer):
            saving = tiny.checkpointer(Path(into, name), model, optimizer)
            saving.save(1)
            saving.close()
    expected = [local(p).detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other = tiny.checkpointer(Path(into, "torch"), model, optimizer)
    assert other.load(layout.folder_of(Path(into, "torch"), 1)) == 1
    other.close()
    now = [local(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, now, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shards_are_as_torch_writes_them(tmp_path: Path, num_ranks: int) -> None:
    launch(save_both_ways, num_ranks, tmp_path, into=str(tmp_path))
    ours, theirs = (layout.folder_of(tmp_path / name, 1) for name in ("ours", "torch"))
    names = {path.name for path in theirs.glob("*.safetensors")}
    assert len(names) == num_ranks
    assert {path.name for path in ours.glob("*.safetensors")} == names
    for name in names:
        first, second = load_file(ours / name), load_file(theirs / name)
        assert first.keys() == second.keys()
        assert any(key.startswith("optimizer.") for key in first)
        for key, tensor in first.items():
            assert tensor.dtype == second[key].dtype
            assert torch.equal(tensor, second[key])
        places = []
        for folder in (ours, theirs):
            with safe_open(folder / name, framework="pt") as file:
                places.append(json.loads(file.metadata()["DCP_SHARDING_INFO"]))
        assert places[0] == places[1]


def resident(name: str) -> int:
    """Bytes of this process that are in memory (`VmRSS`), or the most that were (`VmHWM`)."""
    lines = (PROC / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(not (PROC / "clear_refs").exists(), reason="Linux resets a peak, others do not")
def test_writing_makes_no_copy(tmp_path: Path) -> None:
    distributed.start()
    model = Policy(tiny.causal_lm("gpt2", width=512))
    optimizer = optim.build_optimizer(model, tiny.train_config())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    saving = tiny.checkpointer(tmp_path, model, optimizer, async_save=False, keep_last=1)
    saving.save(1)  # imports, and what stays
    saving.wait()
    gc.collect()
    before = resident("VmRSS")
    (PROC / "clear_refs").write_text("5")
    saving.save(2)
    saving.wait()
    size = sum(path.stat().st_size for path in layout.folder_of(tmp_path, 2).iterdir())
    assert size > 70e6
    assert resident("VmHWM") - before < 0.2 * size
    saving.close()
