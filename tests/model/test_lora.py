"""Claim: LoRA trains adapters and nothing else, and everyone sees the model that they make.

Gradients are those of the merged weights by the chain rule. Layouts, ranks and resumed runs agree
as they do without LoRA. The sampler and what is exported are the trained policy, by peft too; the
reference is the policy as it started, as a second model of the same weights would be. About
`common.model.lora`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel
from ranks import SHORT_RUN, Job, launch, run_stages, untimed_lines, whole
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from common import distributed
from common.batch import AnyBatch, padded_batch, shared_prefix_batch
from common.checkpoint import export, hf_folder, layout
from common.config.flags import ModelFlags
from common.config.stages import SFTConfig
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, load, lora, optim
from common.model.lora import AdapterReference
from common.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("process_group")

FAMILIES = ("gpt2", "llama")  # `Conv1D`, whose weight is (in, out), and `nn.Linear`
LAYERS = {
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    "llama": {f"self_attn.{x}_proj" for x in "qkvo"}
    | {f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURE |= {"mlp_only_layers": [0]}
PAD_ID = 1
EXAMPLES = tiny.ragged_examples([(9, 4, 2), (1, 1, 7), (14, 3, 3)], vocab_size=300)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder with weights and tokenizer for each family."""
    folders = {}
    for family, fields in {**dict.fromkeys(FAMILIES, {}), "qwen3_moe": MIXTURE}.items():
        lm = tiny.causal_lm(family, vocab_size=300, is_plain=True, **fields)
        folders[family] = tiny.save(lm, tmp_path_factory.mktemp(family))
    return folders


def lora_config(path: str, config: Any = SFTConfig, **fields: Any) -> Any:
    lengths = {"max_prompt_length": 40, "max_completion_length": 20}
    needed = {"output_dir": "unused", "micro_batch_size": 4, "lora_r": 4, "lora_alpha": 8}
    return config(**(needed | lengths | {"model_name_or_path": path} | fields))


def new_policy(path: str, **fields: Any) -> Policy:
    config = lora_config(path, **fields)
    model_config = load.read_model_config(path, "policy", load.load_tokenizer(path, config), config)
    lm = load.load_policy(path, model_config, config, trains=True)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    assert isinstance(policy, Policy)
    return policy


def batch_of(layout: str = "padded") -> AnyBatch:
    make = padded_batch if layout == "padded" else shared_prefix_batch
    prompts = [example.prompt_ids for example in EXAMPLES]
    completions = [example.completions for example in EXAMPLES]
    return make(prompts, completions, PAD_ID).to(distributed.device())


def loss_of(policy: Policy, batch: AnyBatch) -> Tensor:
    return -policy(batch).token_logps.sum()


def logps_of(model: Any, batch: AnyBatch | None = None) -> Tensor:
    with torch.no_grad():
        logps: Tensor = model(batch or batch_of()).token_logps
    fsdp.reshard(model)
    return logps


def train(policy: Policy, num_steps: int = 3, **fields: Any) -> Policy:
    config = lora_config("unused", learning_rate=0.02, max_grad_norm=0.0, **fields)
    optimizer = optim.build_optimizer(policy, config)
    for step in range(num_steps):
        loss_of(policy, batch_of()).backward()
        optim.clip_and_step(optimizer, config, step, 100)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_the_blocks_has_an_adapter_and_nothing_else(bases, family):
    lm = new_policy(bases[family]).lm
    parents = ("transformer.h", "model.layers")
    expected = {
        f"{parents[family == 'llama']}.{i}.{name}" for i in (0, 1) for name in LAYERS[family]
    }
    assert set(lora.adapted_layers(lm)) == expected
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{matrix}.default.weight" for name in expected for matrix in "AB"
    }
    assert type(lm) is type(tiny.causal_lm(family))


def test_adapters_are_put_where_they_are_asked_for(bases):
    lm = new_policy(bases["gpt2"], lora_target_modules=["attn.c_proj", "c_fc"]).lm
    names = {name.removeprefix("transformer.h.") for name in lora.adapted_layers(lm)}
    assert names == {"0.attn.c_proj", "1.attn.c_proj", "0.mlp.c_fc", "1.mlp.c_fc"}
    for target in ("lm_head", "wte", "proj"):  # outside of the blocks
        words = f"'{target}'; it must be among .*: c_attn, c_fc, c_proj"
        with pytest.raises(UserError, match=words):
            new_policy(bases["gpt2"], lora_target_modules=[target])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_merged_weight_by_the_chain_rule(bases, family):
    """With G the gradient of W' = W + s B A, (out, in): dB = s G A^T and dA = s B^T G."""
    policy = train(new_policy(bases[family]))
    merged = new_policy(bases[family], lora_r=0)
    merged.lm.load_state_dict(lora.merged_state(policy.lm, policy.lm.state_dict()), strict=False)
    loss_of(policy, batch_of()).backward()
    loss_of(merged, batch_of()).backward()
    for name, layer in lora.adapted_layers(policy.lm).items():
        full = merged.lm.get_submodule(name).weight.grad
        full = full.t() if family == "gpt2" else full  # (out, in)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert float(b.detach().abs().max()) > 1e-3, "an adapter that is still 0 shows nothing"
        torch.testing.assert_close(b.grad, 2.0 * full @ a.detach().t(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a.grad, 2.0 * b.detach().t() @ full, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_score_and_train_adapters_alike(bases, family):
    policy = train(new_policy(bases[family]))
    results = []
    for name in ("padded", "shared_prefix"):
        policy.zero_grad()
        batch = batch_of(name)
        loss_of(policy, batch).backward()
        grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}
        results.append((logps_of(policy, batch), grads))
    (padded, padded_grads), (shared, shared_grads) = results
    torch.testing.assert_close(shared, padded, rtol=0, atol=2e-5)
    for name, grad in padded_grads.items():
        torch.testing.assert_close(shared_grads[name], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradient(bases, family):
    grads = []
    for flag in (False, True):
        policy = new_policy(bases[family], gradient_checkpointing=flag)
        loss_of(policy, batch_of("shared_prefix")).backward()
        grads.append({n: p.grad for n, p in policy.named_parameters() if p.requires_grad})
    assert max(float(g.abs().max()) for g in grads[0].values()) > 0.1
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_a_new_policy_and_a_trained_one_with_adapters_off_are_their_base(bases, family, layout):
    policy, batch = new_policy(bases[family]), batch_of(layout)
    base = logps_of(new_policy(bases[family], lora_r=0), batch)
    assert torch.equal(logps_of(policy, batch), base)
    train(policy)
    assert torch.equal(logps_of(AdapterReference(policy), batch), base)
    assert float((logps_of(policy, batch) - base).abs().max()) > 0.1  # and on again afterwards


@pytest.mark.parametrize("shard", [fsdp.shard, tiny.shard_with_fsdp])
def test_a_reference_that_was_asked_first_leaves_gradients_to_the_policy(bases, shard, monkeypatch):
    """FSDP keeps what it finds at its first gather."""
    monkeypatch.setattr(fsdp, "shard", shard)
    policy = new_policy(bases["gpt2"], bf16=True)
    assert bool(fsdp.fsdp_units(policy)) == (shard is tiny.shard_with_fsdp)
    logps_of(AdapterReference(policy))
    loss_of(policy, batch_of()).backward()
    assert all((p.grad is not None) == (".lora_" in n) for n, p in policy.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_the_sampler_draws_from_base_and_adapters(bases, family, bf16):
    """Its log-probabilities are the trainer's, and its copy is a plain model."""
    policy = train(new_policy(bases[family], bf16=bf16))
    sampler = Sampler(policy, tiny.vocabulary([0]), lora_config("unused", bf16=bf16))
    rollouts = sampler.sample(EXAMPLES, num_samples=4)
    groups = [rollouts.completion_ids[i : i + 4] for i in range(0, 12, 4)]
    batch = padded_batch([e.prompt_ids for e in EXAMPLES], groups, PAD_ID).to(distributed.device())
    scores, base = logps_of(policy, batch), logps_of(AdapterReference(policy), batch)
    sampled = rollouts.token_logps[:, : batch.completion_mask.shape[1]]
    gap = (sampled - scores.cpu()).abs()
    assert float(gap.max()) < 1e-4 if not bf16 else float(gap.mean()) < 0.05
    assert float((base.cpu() - sampled).abs().mean()) > 0.1
    assert not lora.adapted_layers(sampler.copy.lm)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_the_exported_model_and_the_exported_adapter_are_the_trained_policy(
    bases, family, tmp_path
):
    policy = train(new_policy(bases[family]))
    ids = torch.tensor([tiny.random_ids(9, seed=1)], device=distributed.device())
    with torch.no_grad():
        expected = policy.lm(input_ids=ids).logits
    export.save_pretrained(policy, tiny.vocabulary([0]), tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not lora.adapted_layers(merged)
    for lm in (merged, adapted):
        with torch.no_grad():
            logits = lm.to(distributed.device()).eval()(input_ids=ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=tiny.rounding(merged))
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert len(weights) == 2 * len(lora.adapted_layers(policy.lm))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "adapter"}


def test_experts_have_no_adapter_and_the_run_says_so(bases, capsys):
    """To peft the first layer, a dense one, has an `up_proj` of stacked experts."""
    lm = new_policy(bases["qwen3_moe"]).lm
    assert {name.split(".")[-2] for name in lora.adapted_layers(lm)} == {"self_attn"}
    # Attention has 3 D^2 in each layer, the dense one 6 D^2, the experts 6 D^2, their router 4 D
    printed = capsys.readouterr().out
    assert f"adapters are on {6 / (18 + 4 / 32):.1%} of the blocks' weights; none on " in printed
    assert "mlp.experts.gate_up_proj, mlp.gate, mlp.gate_proj, mlp.up_proj\n" in printed


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_base_is_held_in_bfloat16_if_it_loses_nothing_and_exported_as_it_was(
    bases, stored, tmp_path
):
    path = str(tmp_path / "base")
    shutil.copytree(bases["llama"], path)
    AutoModelForCausalLM.from_pretrained(path, dtype=stored).save_pretrained(path)
    policy = train(new_policy(path, bf16=True))
    held = {"base": set(), "adapters": set()}
    for name, p in policy.named_parameters():
        held["adapters" if ".lora_" in name else "base"].add(p.dtype)
    assert held == {"base": {stored}, "adapters": {torch.float32}}
    export.save_pretrained(policy, tiny.vocabulary(), tmp_path / "model")
    exported, base = (load_file(tmp_path / x / "model.safetensors") for x in ("model", "base"))
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings["dtype"] == "float32"  # in which transformers reads a folder
    adapted = {f"{name}.weight" for name in lora.adapted_layers(policy.lm)}
    assert exported.keys() == base.keys() > adapted
    for name, layer in lora.adapted_layers(policy.lm).items():
        a, b = (whole(m.default.weight.detach()) for m in (layer.lora_A, layer.lora_B))
        merged = lora.merged_weight(layer, base[f"{name}.weight"], a, b)
        assert torch.equal(exported[f"{name}.weight"], merged)
    for name in base.keys() - adapted:
        assert torch.equal(exported[name], base[name].float())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_to_start_from_is_merged_by_the_lines_of_the_page(
    bases, family, tmp_path, monkeypatch
):
    policy = train(new_policy(bases[family]))
    export.save_pretrained(policy, tiny.vocabulary(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text()
    (lines,) = (block for block in page.split("```") if "merge_and_unload" in block)
    exec(lines.removeprefix("python\n"))
    tiny.tokenizer().save_pretrained("merged")
    for lora_r in (0, 4):
        with pytest.raises(UserError, match="'adapter' holds an adapter and no model; merge it"):
            new_policy("adapter", lora_r=lora_r)
        merged = new_policy("merged", lora_r=lora_r)
        torch.testing.assert_close(logps_of(merged), logps_of(policy), rtol=0, atol=2e-5)
    for exported in ("model", "merged"):  # by transformers alone
        lm = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        logps = logps_of(Policy(lm.to(distributed.device()).eval()))
        torch.testing.assert_close(logps, logps_of(policy), rtol=0, atol=2e-5)


def test_a_config_has_no_weights_to_adapt():
    config = lora_config("shape.json")
    with pytest.raises(UserError, match="shape.json; .* a config has no weights to adapt"):
        load.load(AutoModelForCausalLM, "shape.json", PretrainedConfig(), config)


STEPS, SAVED = 4, 2
COMMON = SHORT_RUN | {
    "num_train_rows": 27,
    "num_eval_rows": 3,
    "num_sample_prompts": 1,
    "max_completion_length": 16,
    "batch_size": 8,
    "micro_batch_size": 3,
    "learning_rate": 1e-2,
    "warmup_steps": 1,
    "max_steps": STEPS,
    "save_steps": SAVED,
    "lora_r": 4,
    "lora_alpha": 8,
}
GRPO = {
    "batch_size": 4,
    "num_candidates": 4,
    "num_generations": 3,
    "num_iterations": 2,
    "reward_funcs": "gold",
    "missing_eos_penalty": -0.2,
    "learning_rate": 2e-3,
}
BASE, SFT = "base/model", "1/sft/model"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> stage and its flags
    "sft": ("sft", {"model_name_or_path": BASE}),
    "reward": ("reward", {"model_name_or_path": BASE, "learning_rate": 1e-3}),
    "dpo": ("dpo", {"model_name_or_path": SFT}),
    "grpo": ("grpo", {"model_name_or_path": BASE}),
}
COPIES = {  # the same weights under another name: a second model is loaded
    "dpo copy": ("dpo", {"model_name_or_path": SFT, "ref_model_name_or_path": "copy/sft"}),
    "grpo copy": ("grpo", {"model_name_or_path": BASE, "ref_model_name_or_path": "copy/base"}),
}
OWN_PAD = ("reward", {"model_name_or_path": BASE, "tokenizer_name_or_path": "own_pad"})
RESUMED = ("sft", "reward", "grpo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str]) -> Path:
    """Holds `<ranks>/<run>`, and `resumed/<run>` on two ranks."""
    folder = tmp_path_factory.mktemp("lora_stages")
    (folder / "copy").mkdir()
    (folder / "copy/base").symlink_to(folder / BASE)
    (folder / "copy/sft").symlink_to(folder / SFT)

    def job(output_dir: str, run: tuple[str, dict[str, Any]], **changes: Any) -> Job:
        stage, flags = run
        flags = flags | changes | {"output_dir": output_dir}
        flags |= {key: str(folder / flags[key]) for key in flags if key.endswith(("_path", "_dir"))}
        return {"stage": stage, "flags": COMMON | (GRPO if stage == "grpo" else {}) | flags}

    base = job("base", RUNS["sft"], lora_r=0, max_steps=20, learning_rate=3e-3, save_steps=0)
    base["flags"] |= start_flags
    own_pad = AutoTokenizer.from_pretrained(start_flags["tokenizer_name_or_path"])
    own_pad.add_special_tokens({"pad_token": "<|padding|>"})
    own_pad.save_pretrained(folder / "own_pad")
    one = [base, *(job(f"1/{name}", run) for name, run in (RUNS | COPIES).items())]
    (loaded,) = launch(run_stages, 1, folder, jobs=one)
    for record in loaded[-len(COPIES) :]:
        assert len(record["devices"]) == 2  # policy and reference
    two = [job(f"2/{name}", run) for name, run in RUNS.items()]
    two += [job("2/bfloat16", RUNS["grpo"], bf16=True), job("2/own pad", OWN_PAD)]
    for name in RESUMED:
        first = layout.folder_of(folder / "2" / name, SAVED)
        two.append(job(f"resumed/{name}", RUNS[name], resume_from_checkpoint=str(first)))
    (folder / "records.json").write_text(json.dumps(launch(run_stages, 2, folder, jobs=two)))
    return folder


def series(run: Path, metric: str) -> Tensor:
    values = [line[metric] for line in untimed_lines(run) if metric in line]
    assert len(values) == STEPS
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_two_ranks_are_one(folder, name, metric):
    values, expected = (series(folder / ranks / name, metric) for ranks in "21")
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "copy"), [("dpo", "dpo copy"), ("grpo", "grpo copy")])
def test_the_reference_in_the_policy_is_the_model_loaded_a_second_time(folder, name, copy):
    """Over all steps: an adapter left on in the reference shows after the first update."""
    for metric in ("loss", "grad_norm", *(["kl"] if "grpo" in name else [])):
        values, expected = (series(folder / "1" / run, metric) for run in (name, copy))
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
        if metric == "kl":
            assert 0 <= float(values[0]) < float(values[-1])
            assert float(values[-1]) > 1e-3


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_one_that_never_stopped(folder, name):
    whole, resumed = folder / "2" / name, folder / "resumed" / name
    assert untimed_lines(resumed) == [line for line in untimed_lines(whole) if line["step"] > SAVED]
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (whole / file).read_bytes() == (resumed / file).read_bytes()


def test_a_checkpoint_holds_adapters_and_their_optimiser_state_only(folder):
    saved = layout.folder_of(folder / "2" / "grpo", SAVED)
    reader = torch.distributed.checkpoint.HuggingFaceStorageReader(str(saved))
    names = list(reader.read_metadata().state_dict_metadata)
    assert sum(name.endswith("exp_avg_sq") for name in names) == 16  # 2 blocks, 4 layers, A and B
    assert len(names) == 16 + 16 * 3
    assert all(".default." in name for name in names)


@pytest.mark.parametrize("name", ["sft", "reward", "own pad", "grpo", "bfloat16"])
def test_an_exported_checkpoint_is_the_run_s_own_model_and_adapter(folder, name, tmp_path):
    """Saved by two ranks; the base is not in it.

    A reward model's has its head, and the row of a pad token that the base does not have.
    """
    run, base = folder / "2" / name, folder / BASE
    checkpoint = shutil.copytree(layout.folder_of(run, STEPS), tmp_path / "saved")
    hf_folder.exported(checkpoint, ModelFlags("unused"))
    for kind in ("model", "adapter"):
        exported = hf_folder.read_settings(checkpoint / kind)
        assert exported == hf_folder.read_settings(run / kind)
    if name == "own pad":
        weights = [load_file(m / "model.safetensors") for m in (checkpoint / "model", base)]
        num_rows, num_before = (len(x["transformer.wte.weight"]) for x in weights)
        assert num_rows == num_before + 1


def test_adapters_and_head_of_a_reward_model_are_trained_and_nothing_else(folder):
    base = load_file(folder / BASE / "model.safetensors")
    trained = load_file(folder / "1" / "reward" / "model" / "model.safetensors")
    adapter = load_file(folder / "1" / "reward" / "adapter" / "adapter_model.safetensors")
    assert torch.equal(adapter.pop("base_model.model.score.weight"), trained["score.weight"])
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter}
    assert len(adapted) == 2 * 4  # layers of two blocks
    for name, tensor in trained.items():
        if name != "score.weight":
            moved = not torch.equal(tensor, base[name])
            assert moved == (name.removesuffix(".weight") in adapted), name


def test_peft_computes_the_exported_reward_model_from_base_and_adapter(folder):
    run = folder / "1" / "reward"
    plain = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    base = AutoModelForSequenceClassification.from_pretrained(folder / BASE, num_labels=1)
    ids = torch.tensor([tiny.random_ids(9, seed=1, vocab_size=300)])
    with torch.no_grad():
        untrained = base.eval()(input_ids=ids).logits
        rewards = PeftModel.from_pretrained(base, run / "adapter").eval()(input_ids=ids).logits
        expected = plain(input_ids=ids).logits
    torch.testing.assert_close(rewards, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untrained).abs() > 0.01


def test_the_base_of_an_export_is_read_at_its_adapter_s_revision(folder, tmp_path, monkeypatch):
    read, seen = LoraConfig.from_pretrained, []

    def of_revision(path: str) -> Any:
        settings = read(path)
        settings.revision = "v1"
        return settings

    def read_base(path: str, settings: Path, config: Any, **_: Any) -> Any:
        seen.append((path, config.model_name_or_path, config.model_revision))
        raise UserError("it is far.")

    monkeypatch.setattr(LoraConfig, "from_pretrained", of_revision)
    monkeypatch.setattr(hf_folder, "read_base", read_base)
    checkpoint = layout.folder_of(folder / "2" / "sft", STEPS)
    with pytest.raises(UserError, match="it is far"):
        hf_folder.export(checkpoint, ModelFlags("unused"))
    assert seen == [(str(folder / BASE), str(folder / BASE), "v1")]


def test_ranks_end_with_the_same_state_and_each_model_is_read_once(folder):
    first, second = json.loads((folder / "records.json").read_text())
    for of_first, of_second in zip(first, second, strict=True):
        assert of_first["state"] == of_second["state"]
        assert of_first["devices"] == [["cpu"]]  # one model: none for the reference
        assert of_second["devices"] == [["meta"]]
        assert of_first["num_local"] < 0.6 * of_first["num_total"]


@pytest.mark.parametrize("fields", [{"lora_r": 1}, {"lora_r": 0}], ids=str)
def test_adapters_of_other_flags_are_not_resumed(bases, tmp_path, fields):
    def built(**fields: Any) -> tuple[Policy, torch.optim.Optimizer]:
        policy = new_policy(bases["gpt2"], **fields)
        return policy, optim.build_optimizer(policy, lora_config("unused"))

    saver = tiny.checkpointer(tmp_path, *built())
    saver.save(1)
    saver.wait()
    folder = layout.folder_of(tmp_path, 1)
    assert tiny.checkpointer(tmp_path, *built()).load(folder) == 1
    with pytest.raises(UserError, match="does not fit the model"):
        tiny.checkpointer(tmp_path, *built(**fields)).load(folder)
