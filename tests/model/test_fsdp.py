"""Sharding: the right units, one reader of the weights, summed gradients, a faithful replica.

Two ranks hold their parts of the model that transformers reads, and their gradients are the sums
that autograd gives on one process; when they are reduced is in `test_shard_gradients`. Parts that
are swapped for quicker ones compute the same. The replica has the policy's weights, draws what one
process draws, and needs no other rank. About `common.model.fsdp` and `common.model.rollout_copy`.
"""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from ranks import hash_of, launch, local, state_hashes, whole
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from common import distributed, self_checks
from common.batch import padded_batch
from common.config.dpo import DPOConfig
from common.forward import Policy, RewardModel
from common.model import fsdp, load, optim
from common.model.rollout_copy import PackedLinear, RolloutCopy
from common.model.rollout_copy import packed as packed_weights
from common.sampling.sampler import Sampler

BLOCKS = {"gpt2": "GPT2Block", "llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer"}
MODELS = {  # name -> family, are the embeddings tied
    "gpt2": ("gpt2", True),
    "llama": ("llama", False),
    "qwen2": ("qwen2", True),
}
PAD_ID = 7
LENGTHS = [(3, 5), (9, 2), (1, 4), (6, 1)]  # of prompt and completion, a row each
PROMPTS = tiny.ragged_examples([(n,) for n in (9, 1, 14, 4, 6)])


class Wrapped(nn.Module):
    """A language model nested in a module that has other layers."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([nn.Linear(500, 500), nn.Linear(500, 500)])
        self.inner = nn.ModuleDict({"policy": Policy(lm)})


# --- which modules become units -------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("wrap", [lambda lm: lm, Policy, Wrapped, RewardModel])
def test_blocks_of_a_language_model(family: str, wrap: Any) -> None:
    lm = tiny.classifier(family) if wrap is RewardModel else tiny.causal_lm(family)
    blocks = fsdp.blocks(wrap(lm))
    assert [type(block).__name__ for block in blocks] == [BLOCKS[family]] * 2
    assert blocks == list(lm.base_model.h if family == "gpt2" else lm.base_model.layers)


def test_blocks_of_a_model_that_names_none() -> None:
    small, large = (nn.ModuleList(nn.Linear(n, n) for _ in range(3)) for n in (2, 20))
    assert fsdp.blocks(nn.ModuleDict({"a": small, "b": large})) == list(large)
    assert fsdp.blocks(nn.Linear(2, 2)) == []


# --- parts swapped for ones that compute the same -------------------------------------------------


def test_the_fused_gelu_is_gpt2_s_and_other_activations_are_kept() -> None:
    """Value and gradient: to rounding of float32 where the formula's eight steps round apart."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-8, -1e-8, 100, -100])])
    lm = tiny.causal_lm("gpt2")
    written = lm.transformer.h[0].mlp.act
    assert type(written) is NewGELUActivation
    fsdp.fuse_gelu(lm)
    results = []
    for activation in (written, lm.transformer.h[0].mlp.act, nn.GELU()):
        inputs = x.clone().requires_grad_()
        output = activation(inputs)
        output.sum().backward()
        results.append((output.detach(), inputs.grad))
    (expected, expected_slope), (fused, slope), (exact, _) = results
    torch.testing.assert_close(fused, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-5, atol=1e-5)
    assert (exact - expected).abs().max() > 1e-4  # the control: erf is another function
    assert not any(isinstance(module, NewGELUActivation) for module in lm.modules())
    assert sum(isinstance(module, nn.GELU) for module in lm.modules()) == 2
    for family, fields in (("llama", {}), ("gpt2", {"activation_function": "relu"})):
        lm = tiny.causal_lm(family, **fields)
        before = [type(module) for module in lm.modules()]
        fsdp.fuse_gelu(lm)
        assert [type(module) for module in lm.modules()] == before


def new_layer(kind: str, with_bias: bool) -> Any:
    """A frozen layer from 24 to 40 features, biases moved off 0."""
    torch.manual_seed(0)
    layer = Conv1D(40, 24) if kind == "conv" else nn.Linear(24, 40, bias=with_bias)
    if kind == "head":
        layer.__class__ = fsdp.Float32Head
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer.requires_grad_(False)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("kind", ["linear", "conv", "head"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_packed_layer_computes_the_same(kind: str, with_bias: bool) -> None:
    """For any number of rows, and rows in a rectangle; target: float64."""
    layer = new_layer(kind, with_bias)
    packed = PackedLinear(layer)
    weight = layer.weight.double().T if kind == "conv" else layer.weight.double()
    for shape in ((1,), (2,), (64,), (67,), (3, 5), (0,)):
        inputs = torch.randn(*shape, 24)
        bias = 0 if layer.bias is None else layer.bias.double()
        output = packed(inputs)
        assert output.dtype == torch.float32
        torch.testing.assert_close(
            output.double(), inputs.double() @ weight.T + bias, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_packed_bfloat16_layer_rounds_once(kind: str) -> None:
    """Its result is the exact one to half a step of bfloat16, which has 8 bits."""
    layer = new_layer(kind, True).bfloat16()
    weight = layer.weight.double().T if kind == "conv" else layer.weight.double()
    model = nn.Sequential(layer)
    with packed_weights(model):  # leaves the layer as it is where oneDNN has no bfloat16
        for num_rows in (1, 3, 70):
            inputs = torch.randn(num_rows, 24).bfloat16()
            output = model(inputs)
            assert output.dtype == torch.bfloat16
            exact = inputs.double() @ weight.T + layer.bias.double()
            torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packing_is_undone(family: str) -> None:
    """Inside, weights are held once, and embeddings are kept; afterwards the layers are back."""
    distributed.start()
    lm = tiny.causal_lm(family, tie_word_embeddings=False).requires_grad_(False)
    ids = torch.tensor([tiny.random_ids(9, seed=1)], device=distributed.device())
    expected = lm(input_ids=ids).logits
    embedding, limit = lm.get_input_embeddings().weight, tiny.rounding(lm)
    before = {name: type(module) for name, module in lm.named_modules()}
    with packed_weights(lm):
        torch.testing.assert_close(lm(input_ids=ids).logits, expected, rtol=0, atol=limit)
        assert lm.get_input_embeddings().weight is embedding
        if distributed.device().type == "cpu" and torch.backends.mkldnn.is_available():
            num_packed = sum(isinstance(module, PackedLinear) for module in lm.modules())
            assert num_packed == 2 * (4 if family == "gpt2" else 7) + 1
            assert not [module for module in lm.modules() if isinstance(module, nn.Linear | Conv1D)]
    assert {name: type(module) for name, module in lm.named_modules()} == before


def test_only_frozen_models_are_offloaded_where_only_they_are_asked_for() -> None:
    """A unit of FSDP's in one process of float32 is one that offloads; one that moves stays."""
    distributed.start()
    config = DPOConfig(output_dir="unused", model_name_or_path="unused", offload_frozen=True)
    mesh = distributed.mesh()
    batch = padded_batch([[3, 4, 5]], [[[6, 7]]], 1)
    scores = {}
    for name, moves in (("policy", False), ("frozen", False), ("moving", True)):
        policy = Policy(tiny.causal_lm("gpt2")).requires_grad_(name == "policy")
        policy = fsdp.shard(policy, config, mesh, moves=moves)
        assert isinstance(policy, FSDPModule) == (name == "frozen")
        scores[name] = policy(batch).token_logps.detach()
    for logps in scores.values():
        torch.testing.assert_close(logps, scores["policy"], rtol=0, atol=1e-6)


# --- on two ranks ---------------------------------------------------------------------------------


def weights_folder(folder: Path, name: str) -> str:
    """A model's folder: for rank 0 the real one, for the others one without weights."""
    return str(folder / name / ("whole" if distributed.is_rank0() else "without_weights"))


def load_policy(folder: Path, name: str, **fields: Any) -> Policy:
    config = tiny.train_config(**fields)
    path = weights_folder(folder, name)
    lm = load.load_policy(path, AutoConfig.from_pretrained(path), config)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    assert isinstance(policy, Policy)
    return policy


def inspect_model(folder: str, name: str) -> dict[str, Any]:
    """Shard a model, make gradients of all rows, sample from its replica. Runs on every rank."""
    policy = load_policy(Path(folder), name)
    lm, rank = policy.lm, distributed.rank()
    parameters = list(policy.parameters())
    seen: dict[str, Any] = {
        "state": state_hashes(policy),
        "units": sorted(type(unit).__name__ for unit in fsdp.fsdp_units(policy)),
        "all_sharded": all(isinstance(p, DTensor) for p in parameters),
        "share": sum(local(p).numel() for p in parameters) / sum(p.numel() for p in parameters),
        "is_tied": lm.get_output_embeddings().weight is lm.get_input_embeddings().weight,
        "num_in_full_state": len(fsdp.full_state_dict(policy)),
    }

    replica = RolloutCopy(lm, tiny.train_config())
    seen["before"] = inspect_replica(replica, policy)
    add_gradients(policy, rank)
    gradients = {key: whole(p.grad) for key, p in lm.named_parameters()}
    if rank == 0:
        save_file(gradients, Path(folder) / name / "gradients.safetensors")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.01 * parameter.grad
    seen["changed_state"] = state_hashes(policy)
    seen["after"] = inspect_replica(replica, policy)
    return seen


def add_gradients(policy: Policy, rank: int) -> None:
    """Accumulate the gradient of -log pi of every row: a row per micro-batch, two rows per rank."""
    examples = tiny.ragged_examples(LENGTHS)[rank::2]
    for i, example in enumerate(examples):
        fsdp.reduce_gradients_in_next_backward(policy, i == len(examples) - 1)
        batch = padded_batch([example.prompt_ids], [example.completions], PAD_ID)
        (-policy(batch).token_logps.sum()).backward()


def inspect_replica(replica: RolloutCopy, policy: Policy) -> dict[str, Any]:
    """Use the replica, on this rank as often as it likes."""
    example = tiny.ragged_examples(LENGTHS)[0]
    unpacked = mock.patch("common.model.rollout_copy.packed", nullcontext)
    with unpacked, replica.gathered(policy) as lm:
        hashes = {f"lm.{key}": hash_of(p.data) for key, p in lm.named_parameters()}
        hashes |= {f"lm.{key}": hash_of(b) for key, b in lm.named_buffers()}
        head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
        shares_memory = head.data_ptr() == embedding.data_ptr()
        if shares_memory:  # the head's own entry, of a cast that changes nothing
            assert hashes.pop("lm.lm_head.weight") == hash_of(embedding.data)
    with replica.gathered(policy) as lm:  # packed, as it is used
        for _ in range(1 + 2 * distributed.rank()):  # would hang if it needed the other rank
            logits = lm(input_ids=torch.tensor([example.prompt_ids])).logits
    return {
        "state": hashes,
        "logits": logits[0, -1].tolist(),
        "needs_grad": logits.requires_grad,
        "shares_memory": shares_memory,
        "is_tied": lm.get_output_embeddings().weight is lm.get_input_embeddings().weight,
        "devices_afterwards": sorted({p.device.type for p in lm.parameters()}),
        "policy_is_sharded": all(isinstance(p, DTensor) for p in policy.parameters()),
    }


def inspect_all(models_folder: str) -> dict[str, Any]:
    seen = {name: inspect_model(models_folder, name) for name in MODELS}
    seen["bfloat16 replica"] = inspect_bfloat16_replica(models_folder)
    seen["reward model"] = inspect_reward_model(models_folder)
    seen["frozen"] = inspect_frozen(models_folder)
    return seen | {"apart": go_apart(models_folder)}


def go_apart(folder: str) -> dict[str, Any]:
    """Sample unequal numbers of prompts; make a step that is bad on the last rank, and checks.

    A collective in the token loop, or in each batch, would wait for a rank that has none.
    """
    policy, rank = load_policy(Path(folder), "gpt2"), distributed.rank()
    sampler = new_sampler(policy)
    prompts = PROMPTS[4:] if rank else PROMPTS[:4]  # in two batches and in one
    record: dict[str, Any] = {"own": sampler.sample(prompts, num_samples=3).completion_ids}
    record["second"] = sampler.sample(PROMPTS[: 2 * rank]).completion_ids
    for number in (5, 1):  # of one the other rank has none
        shared = sampler.sample_shared(PROMPTS[:number], temperature=1.0, title="sampling")
        record[f"shared {number}"] = [shared.completion_ids, shared.has_stop.tolist()]
        record[f"logps {number}"] = shared.token_logps.tolist()
    record["errors"] = []
    config = tiny.train_config()
    optimizer = optim.build_optimizer(policy, config)
    add_gradients(policy, rank)
    if rank == 1:
        local(policy.lm.transformer.wte.weight.grad)[0, 0] = torch.nan
    for check in (
        lambda: optim.clip_and_step(optimizer, config, 1, 2),
        lambda: self_checks.equal_across_ranks("the same", torch.ones(3)),
        lambda: self_checks.equal_across_ranks("a head", torch.tensor([1.0, 2.0 + rank])),
    ):
        try:
            check()
        except RuntimeError as error:
            record["errors"].append(str(error))
    return record


def new_sampler(policy: Policy) -> Sampler:
    config = tiny.train_config(max_completion_length=10, generation_batch_size=2)
    return Sampler(policy, tiny.vocabulary(range(0, 61, 6)), config)


def inspect_bfloat16_replica(folder: str) -> dict[str, Any]:
    """The replica of a policy that computes in bfloat16."""
    policy = load_policy(Path(folder), "gpt2", bf16=True)
    replica = RolloutCopy(policy.lm, tiny.train_config(bf16=True))
    unpacked = mock.patch("common.model.rollout_copy.packed", nullcontext)
    with unpacked, replica.gathered(policy) as lm:
        return {key: hash_of(p.data) for key, p in lm.named_parameters()}


def inspect_reward_model(folder: str) -> dict[str, Any]:
    """A new reward head and one more token, under bfloat16."""
    config = tiny.train_config(bf16=True)
    path = weights_folder(Path(folder), "gpt2")
    tokenizer = Tokens(range(62))  # one more than the model
    lm = load.load_reward_model(path, AutoConfig.from_pretrained(path), tokenizer, config)
    model = fsdp.shard(RewardModel(lm), config, distributed.mesh(), float32_modules=[lm.score])
    seen: dict[str, Any] = {"state": state_hashes(model)}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            dtypes = {p.dtype for p in module.parameters()} | {inputs[0].dtype}
            seen[name] = sorted(map(str, dtypes))

        return hook

    fsdp.blocks(model)[0].register_forward_pre_hook(note("block"))
    lm.score.register_forward_pre_hook(note("head"))
    rewards = model(padded_batch([[3, 4 + distributed.rank(), 61]], [[[5], [6]]], 61))
    rewards.sum().backward()
    gradient = local(fsdp.blocks(model)[0].mlp.c_fc.weight.grad)
    seen["share_rounded"] = float((gradient == gradient.bfloat16()).float().mean())
    seen["rewards"] = str(rewards.dtype)
    seen["gradients"] = sorted({str(p.grad.dtype) for p in model.parameters()})
    seen["head_std"] = float(whole(lm.score.weight.detach()).std())
    return seen


def inspect_frozen(folder: str) -> dict[str, Any]:
    """Frozen models under bfloat16: dtypes of their shards, and log-probabilities of a batch."""
    config, mesh = tiny.train_config(bf16=True), distributed.mesh()
    path = weights_folder(Path(folder), "gpt2")
    model_config = AutoConfig.from_pretrained(path)
    batch = padded_batch([[3, 4 + distributed.rank(), 60]], [[[5, 7], [6]]], PAD_ID)
    seen: dict[str, Any] = {}
    for name, moves in (("stays", False), ("moves", True)):
        policy = Policy(load.load_policy(path, model_config, config)).requires_grad_(False)
        policy = fsdp.shard(policy, config, mesh, moves=moves)
        seen[name] = sorted({str(local(p).dtype) for p in policy.parameters()})
        with torch.no_grad():
            seen[f"{name}, logps"] = policy(batch).token_logps.tolist()
    lm = load.load_reward_model(path, model_config, Tokens(range(62)), config)
    model = RewardModel(lm).requires_grad_(False)
    model = fsdp.shard(model, config, mesh, float32_modules=[lm.score])
    seen["head"] = str(local(lm.score.weight).dtype)
    seen["trunk"] = sorted({str(local(p).dtype) for p in lm.base_model.parameters()})
    return seen


class Tokens(list[int]):
    """A tokenizer as `load_reward_model` needs it: its length and its pad token."""

    pad_token_id = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    for name, (family, is_tied) in MODELS.items():
        tiny.causal_lm(family, tie_word_embeddings=is_tied).save_pretrained(folder / name / "whole")
        without = folder / name / "without_weights"
        shutil.copytree(folder / name / "whole", without)
        (without / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return launch(inspect_all, 2, folder, models_folder=str(folder))


def expected_state(path: Path) -> dict[str, str]:
    """Hashes of the parameters and buffers that plain transformers reads from a folder."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = dict(lm.named_parameters()) | dict(lm.named_buffers())
    return {f"lm.{key}": hash_of(tensor.detach()) for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_holds_its_part_of_what_rank_0_read_and_rank_0_collects_it(seen, folder, name):
    expected = expected_state(folder / name / "whole")
    for rank in seen:
        assert rank[name]["state"] == expected
        assert rank[name]["all_sharded"]
        assert rank[name]["share"] == pytest.approx(0.5, abs=0.02)
        assert rank[name]["is_tied"] == MODELS[name][1]
    block = f"FSDP{BLOCKS[MODELS[name][0]]}"
    assert seen[0][name]["units"] == sorted([block, block, "FSDPPolicy"])
    first, second = (rank[name]["num_in_full_state"] for rank in seen)
    assert first >= len([key for key in seen[0][name]["state"] if "inv_freq" not in key])
    assert second == 0


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_sums_over_micro_batches_and_ranks(seen, folder, name):
    del seen  # whose ranks wrote the file
    lm = AutoModelForCausalLM.from_pretrained(folder / name / "whole", dtype=torch.float32)
    for example in tiny.ragged_examples(LENGTHS):
        (-tiny.plain_logps(lm, example.prompt_ids, *example.completions).sum()).backward()
    gradients = load_file(folder / name / "gradients.safetensors")
    for key, parameter in lm.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_replica_is_the_policy_and_is_freed(seen, name, when):
    for rank in seen:
        replica = rank[name][when]
        assert replica["state"] == rank[name]["state" if when == "before" else "changed_state"]
        assert replica["logits"] == seen[0][name][when]["logits"]
        assert not replica["needs_grad"]
        assert replica["is_tied"] == replica["shares_memory"] == MODELS[name][1]
        assert replica["devices_afterwards"] == ["meta"]
        assert replica["policy_is_sharded"]
    assert seen[0][name]["state"] != seen[0][name]["changed_state"]


def test_bfloat16_replica_holds_rounded_weights(seen: list[dict[str, Any]], folder: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder / "gpt2" / "whole", dtype=torch.float32)
    expected = {key: hash_of(p.detach().bfloat16()) for key, p in lm.named_parameters()}
    # The head was cast once: rounded like the embedding, and in float32.
    expected["lm_head.weight"] = hash_of(lm.lm_head.weight.detach().bfloat16().float())
    for rank in seen:
        assert rank["bfloat16 replica"] == expected


def test_bfloat16_reward_model_has_a_float32_head_and_float32_sums(seen):
    first, second = (rank["reward model"] for rank in seen)
    assert first["state"] == second["state"]
    assert first["block"] == ["torch.bfloat16"]
    assert first["head"] == ["torch.float32"]
    assert first["rewards"] == "torch.float32"
    assert first["gradients"] == ["torch.float32"]
    # The sum of two ranks' bfloat16 gradients has more bits, if it is made in float32.
    assert first["share_rounded"] < 0.9
    assert first["head_std"] == pytest.approx(33**-0.5, rel=0.4)  # of 32 draws


def test_frozen_models_are_held_in_bfloat16_unless_they_move(seen: list[dict[str, Any]]) -> None:
    for frozen in (rank["frozen"] for rank in seen):
        assert frozen["stays"] == frozen["trunk"] == ["torch.bfloat16"]
        assert frozen["moves"] == ["torch.float32"]
        assert frozen["head"] == "torch.float32"
        assert frozen["stays, logps"] == frozen["moves, logps"]


def test_ranks_draw_what_one_process_draws_however_the_prompts_are_shared(seen):
    sampler = new_sampler(Policy(tiny.causal_lm("gpt2")))
    ids = sampler.sample(PROMPTS, num_samples=3).completion_ids
    first, second = (rank["apart"] for rank in seen)
    assert (first["own"], second["own"]) == (ids[:12], ids[12:])
    assert (first["second"], second["second"]) == ([], [ids[0], ids[3]])
    for number in (5, 1):
        alone = sampler.sample(PROMPTS[:number])
        for rank in (first, second):
            assert rank[f"shared {number}"] == [alone.completion_ids, alone.has_stop.tolist()]
            logps = torch.tensor(rank[f"logps {number}"])
            torch.testing.assert_close(logps, alone.token_logps, rtol=0, atol=1e-5)


def test_a_bad_gradient_of_one_rank_or_a_head_that_differs_stops_both(seen):
    for rank in seen:
        gradient, head = rank["apart"]["errors"]
        assert "at step 2 the gradient norm is nan" in gradient
        assert "a head differs between ranks" in head
