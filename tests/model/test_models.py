"""Claim: what is exported is what was trained, and plain transformers reads it that way.

Policies and reward models are sharded, updated, exported and loaded again with transformers alone:
same weights, same outputs, same tokenizer, ties kept, the shift of the rewards included. Reward
heads have variance 1/(d+1), scores are read before a pad token of their own, and nothing but
safetensors and built-in code is loaded. About `common.model.load`, `common.model.checks`,
`common.model.text_part` and `common.checkpoint.export`.
"""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistakes
import pytest
import ranks
import tiny
import torch
from huggingface_hub import constants
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from common import distributed, self_checks
from common.batch import padded_batch
from common.checkpoint import export
from common.config.stages import TrainConfig
from common.errors import UserError
from common.evaluation.scoring import check_sampler
from common.forward import Policy, RewardModel
from common.model import fsdp, optim
from common.model import load as models
from common.noise import HEAD_STDS
from common.sampling.sampler import Sampler
from common.text import sources

pytestmark = pytest.mark.usefixtures("process_group")

PROMPTS = [[n % 50 + 2 for n in tiny.random_ids(k, seed=k)] for k in (7, 2, 11)]
COMPLETIONS = [[*tiny.random_ids(k, seed=90 + k), 0] for k in (4, 6, 1)]  # id 0: eos


def batch_of_rows(pad_id: int) -> Any:
    batch = padded_batch(PROMPTS, [[completion] for completion in COMPLETIONS], pad_id)
    return batch.to(distributed.device())


def short_config(**fields: Any) -> TrainConfig:
    return tiny.train_config(**({"max_prompt_length": 40, "max_completion_length": 20} | fields))


def update(module: nn.Module, loss: Callable[[], Tensor], config: TrainConfig) -> None:
    """One visible optimiser step; the optimiser is made while the parameters are shards."""
    optimizer = optim.build_optimizer(module, config)
    loss().backward()
    optim.clip_and_step(optimizer, config, 0, 1)


def save_policy(folder: Path, family: str = "gpt2", tokenizer: Any = None, **fields: Any) -> str:
    return tiny.save(tiny.causal_lm(family, **({"vocab_size": 300} | fields)), folder, tokenizer)


def eos_padded_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: no pad token, so the eos token pads."""
    backend = tiny.tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def test_a_revision_is_read_of_the_model_that_was_named(tmp_path, monkeypatch):
    """As from a hub's cache on a machine without network: two commits, of which main is one."""
    cache = tmp_path / "models--lab--tiny"
    commits = {"main": "a" * 40, "v2": "b" * 40}
    for seed, (name, commit) in enumerate(commits.items()):
        save_policy(cache / "snapshots" / commit, seed=seed)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)
    of_v2 = copy.deepcopy(tiny.tokenizer())
    of_v2.add_tokens([AddedToken("<|of_v2|>")])
    of_v2.save_pretrained(cache / "snapshots" / commits["v2"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def read(path: str, config: Any) -> tuple[Any, int]:
        tokenizer = models.load_tokenizer(path, config)
        lm = models.load_policy(path, models.find_config(path, tokenizer, config), config)
        return lm, len(tokenizer)

    for name, commit in commits.items():
        config = short_config(model_name_or_path="lab/tiny", model_revision=name)
        lm, num_ids = read("lab/tiny", config)
        expected = AutoModelForCausalLM.from_pretrained(cache / "snapshots" / commit)
        assert torch.equal(lm.transformer.wte.weight, expected.transformer.wte.weight)
        assert num_ids == len(tiny.tokenizer()) + (name == "v2")
        assert lm.config._commit_hash == commit
    # another model of the run, as a judge, is not meant
    (tmp_path / "models--lab--judge").symlink_to(cache)
    assert read("lab/judge", config)[1] == len(tiny.tokenizer())
    with pytest.raises(UserError, match="no tokenizer could be loaded from 'lab/tiny'"):
        read("lab/tiny", short_config(model_name_or_path="lab/tiny", model_revision="v3"))
    local = str(cache / "snapshots" / commits["main"])
    config = short_config(model_name_or_path=local, model_revision="v2")
    assert read(local, config)[1] == len(tiny.tokenizer()), "of a folder it has no effect"
    # adapters on it: their settings name the revision of their base
    lm = models.load_policy(
        "lab/tiny",
        models.find_config("lab/tiny", None, config),
        short_config(model_name_or_path="lab/tiny", model_revision="v2", lora_r=2),
        trains=True,
    )
    assert lm.peft_config["default"].revision == "v2"


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_exported_policy_is_the_trained_one(family, is_tied, tmp_path):
    config = short_config(learning_rate=0.05, bf16=family == "qwen2")
    lm = tiny.causal_lm(family, vocab_size=300, tie_word_embeddings=is_tied)
    initial = copy.deepcopy(lm)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    batch = batch_of_rows(pad_id=1)
    update(policy, lambda: -policy(batch).token_logps.mean(), config)
    folder = tmp_path / "model"
    export.save_pretrained(policy, tiny.vocabulary([5, 0]), folder)

    loaded = AutoModelForCausalLM.from_pretrained(folder).to(distributed.device()).eval()
    for name, parameter in policy.lm.named_parameters():
        target = ranks.whole(parameter)
        assert target.dtype == torch.float32
        assert torch.equal(loaded.get_parameter(name).data, target), name
        assert not torch.equal(target, initial.get_parameter(name)), f"{name} was not trained"
    ties = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert ties == is_tied
    plain = tiny.causal_lm(family, is_plain=True)  # nothing that was swapped for speed is left
    assert list(map(type, loaded.modules())) == list(map(type, plain.modules()))
    assert loaded.config._attn_implementation == plain.config._attn_implementation
    if not config.bf16:
        with torch.no_grad():
            logps = Policy(loaded)(batch).token_logps, policy(batch).token_logps
        torch.testing.assert_close(*logps, rtol=0, atol=tiny.rounding(loaded))


def train_and_sample(base: str, lora_r: int) -> list[Any]:
    """Log-probabilities before and after a step; the sampler is checked, the model exported."""
    config = short_config(model_name_or_path=base, lora_r=lora_r, learning_rate=0.05)
    vocabulary = models.load_vocabulary(config)
    model_config = models.read_model_config(base, "policy", vocabulary.tokenizer, config)
    lm = models.load_policy(base, model_config, config, trains=True)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    batch, examples = batch_of_rows(pad_id=1), tiny.ragged_examples([(5,), (9,)], vocab_size=300)
    before = self_checks.scores(policy, batch).tolist()
    update(policy, lambda: -policy(batch).token_logps.mean(), config)
    sampler = Sampler(policy, vocabulary, config)
    check_sampler(sampler, examples, sampler.sample(examples, num_samples=3), 1.0)
    export.save_pretrained(policy, vocabulary, Path(base, "out/model"))
    return [before, self_checks.scores(policy, batch).tolist()]


@pytest.mark.parametrize(("num_ranks", "lora_r"), [(1, 0), (1, 2), (2, 0)])
def test_a_head_that_only_the_files_untie_is_kept_everywhere(num_ranks, lora_r, tmp_path):
    """The files decide, as in transformers, and not config.json."""
    folder = save_policy(tmp_path, "llama", tie_word_embeddings=False)
    mistakes.change(tmp_path / "config.json", tie_word_embeddings=True)
    here = [train_and_sample(folder, lora_r)] if num_ranks == 1 else []
    for logps in here or ranks.launch(train_and_sample, 2, tmp_path, base=folder, lora_r=lora_r):
        for values, path in zip(logps, (tmp_path, tmp_path / "out/model"), strict=True):
            lm = AutoModelForCausalLM.from_pretrained(path).to(distributed.device()).eval()
            expected = self_checks.scores(Policy(lm), batch_of_rows(pad_id=1))
            torch.testing.assert_close(torch.tensor(values), expected.cpu(), rtol=1e-5, atol=1e-5)
            assert lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight
        assert not lm.config.tie_word_embeddings
        assert logps[0] != logps[1]


def test_an_exported_folder_holds_float32_safetensors_tokenizer_and_stop_tokens(tmp_path):
    config = short_config()
    policy = fsdp.shard(Policy(tiny.causal_lm("gpt2", vocab_size=300)), config, distributed.mesh())
    folder = tmp_path / "model"
    for content in ("stale", "again"):  # a second export replaces the folder whole
        export.save_pretrained(policy, tiny.vocabulary([5, 0]), folder)
        (folder / "stale").write_text(content)
    two = copy.deepcopy(tiny.tokenizer())
    two.chat_template = {"default": "{{ messages }}", "rag": "{{ documents }}"}
    export.save_pretrained(policy, tiny.vocabulary(of=two), folder)  # with a folder of templates
    (template,) = (folder / "additional_chat_templates").iterdir()
    assert template.stat().st_mode == (folder / "config.json").stat().st_mode
    assert template.parent.stat().st_mode == folder.stat().st_mode
    export.save_pretrained(policy, tiny.vocabulary([5, 0]), folder)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    (tmp_path / "disk").mkdir()
    folder.rename(tmp_path / "disk" / "there")
    folder.symlink_to(tmp_path / "disk" / "there")  # it is followed, and stays
    (tmp_path / "disk" / "there.partial").symlink_to("gone")
    (folder / "stale").write_text("")
    export.save_pretrained(policy, tiny.vocabulary([5, 0]), folder)
    assert folder.is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["there"]
    mode = 0o666 & (tmp_path / "disk").stat().st_mode
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ".jinja"}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "SUBREDDIT: r/advice\nTITLE: lost my key\n\nTL;DR: lost it"
    assert tokenizer(text)["input_ids"] == tiny.tokenizer()(text)["input_ids"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generation_config.eos_token_id == [5, 0]
    assert loaded.generation_config.pad_token_id == 1
    assert loaded.config.use_cache


@pytest.mark.parametrize("odd", [{"temperature": 0.7}, {"top_p": 0.9, "length_penalty": 2.0}])
def test_settings_of_sampling_that_cannot_be_written_are_dropped_at_the_start(
    odd, tmp_path, capsys
):
    path = save_policy(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(odd))
    config = short_config(model_name_or_path=path)
    model_config = models.read_model_config(path, "policy", tiny.tokenizer(), config)
    lm = models.load_policy(path, model_config, config, trains=True)
    assert "generation_config.json of" in capsys.readouterr().out
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    export.save_pretrained(policy, tiny.vocabulary([5, 0]), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert not odd.keys() & written.keys()
    assert (written["eos_token_id"], written["bos_token_id"]) == ([5, 0], 0)


@pytest.mark.parametrize("reads", [True, False], ids=["rank 0", "a rank that does not read"])
def test_weights_stored_in_bfloat16_are_trained_in_float32(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(distributed, "is_rank0", lambda: reads)
    folder = tmp_path / "policy"
    tiny.causal_lm("llama", vocab_size=300).bfloat16().save_pretrained(folder)
    config = short_config()
    for kind, load in (("policy", models.load_policy), ("trunk", models.load_reward_model)):
        model_config = models.read_model_config(str(folder), kind, tiny.tokenizer(), config)
        tokenizers = () if kind == "policy" else (tiny.tokenizer(),)
        lm = load(str(folder), model_config, *tokenizers, config)
        assert {p.dtype for p in lm.parameters()} == {torch.float32}


@pytest.mark.parametrize(("number", "words"), [(torch.nan, "NaN"), (torch.inf, "infinite")])
def test_weights_that_are_no_finite_numbers_are_refused_by_name(tmp_path, number, words):
    """Before any self-check, which could say only that scores are NaN."""
    policy, config = tiny.causal_lm("llama", vocab_size=300), short_config()
    judge = tiny.classifier("llama", vocab_size=300, pad_id=1)
    for lm in (policy, judge):
        lm.base_model.layers[1].mlp.up_proj.weight.data[3, 4] = number
    tokenizer, path = tiny.tokenizer(), tiny.save(policy, tmp_path / "policy")
    model_config = models.read_model_config(path, "policy", tokenizer, config)
    with pytest.raises(UserError) as caught:
        models.load_policy(path, model_config, config)
    name = "'model.layers.1.mlp.up_proj.weight'"
    tiny.check_sentence(caught.value, path, words, name)
    path = tiny.save(judge, tmp_path / "judge")
    model_config = models.read_model_config(path, "reward_model", tokenizer, config)
    with pytest.raises(UserError, match=words):
        models.load_reward_model(path, model_config, tokenizer, config)


def test_large_weights_are_no_infinite_ones(tmp_path):
    """Their sum is more than a float32 holds."""
    lm, config = tiny.causal_lm("llama", vocab_size=300), short_config()
    lm.base_model.embed_tokens.weight.data[:] = 3e38
    path = tiny.save(lm, tmp_path)
    model_config = models.read_model_config(path, "policy", tiny.tokenizer(), config)
    assert models.load_policy(path, model_config, config) is not None


def test_weights_from_a_config_file_are_a_function_of_the_seed(tmp_path):
    path = tmp_path / "tiny.json"
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    path.write_text(json.dumps({"model_type": "gpt2", "resid_pdrop": 0.5, **shape}))

    def weights(seed: int) -> Tensor:
        torch.manual_seed(torch.seed())  # whatever was drawn before
        config = short_config(seed=seed)
        model_config = models.read_model_config(str(path), "policy", tiny.tokenizer(), config)
        assert model_config.vocab_size == 300
        assert (model_config.eos_token_id, model_config.resid_pdrop) == (0, 0.0)
        lm = models.load_policy(str(path), model_config, config)
        return torch.cat([p.detach().flatten() for p in lm.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    every_id = models.read_model_config(
        str(path), "policy", tokenizer_with_a_gap(70), short_config()
    )
    assert every_id.vocab_size == 71


def new_reward_model(path: str, config: TrainConfig) -> tuple[RewardModel, Any]:
    """A sharded reward model on the trunk at `path`, as the reward stage makes it."""
    tokenizer = models.load_tokenizer(path, config)
    models.add_own_pad_token(tokenizer)
    model_config = models.read_model_config(path, "trunk", tokenizer, config)
    lm = models.load_reward_model(path, model_config, tokenizer, config)
    model: Any = fsdp.shard(RewardModel(lm), config, distributed.mesh(), float32_modules=[lm.score])
    return model, tokenizer


def transformers_rewards(folder: Path, side: str = "right") -> Tensor:
    """Scores by transformers alone: its tokenizer pads, its classifier looks for the last token."""
    lm = AutoModelForSequenceClassification.from_pretrained(folder).to(distributed.device()).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    rows = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(distributed.device())
    with torch.no_grad():
        logits = lm(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    assert logits.shape == (3, 1)
    return logits[:, 0]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "opt"])
def test_an_exported_reward_model_is_the_trained_one(family, tmp_path):
    """With its shift: in the weights where the last norm has a bias, else in the config."""
    config = short_config(learning_rate=0.05)
    shape = {"ffn_dim": 64, "word_embed_proj_dim": 32} if family == "opt" else {}
    model, tokenizer = new_reward_model(save_policy(tmp_path / "policy", family, **shape), config)
    batch = batch_of_rows(tokenizer.pad_token_id)
    update(model, lambda: model(batch).square().mean(), config)
    with torch.no_grad():
        raw = model(batch)
    shift = -float(raw.mean())
    folder = tmp_path / "model"
    export.save_pretrained(model, tiny.vocabulary(of=tokenizer), folder, reward_shift=shift)

    plain = transformers_rewards(folder)
    saved_shift = json.loads((folder / "config.json").read_text()).get("reward_shift", 0.0)
    assert (saved_shift == 0) == (family in ("gpt2", "opt"))
    limits: Any = {"rtol": 0, "atol": tiny.rounding(model.lm)}
    torch.testing.assert_close(plain + saved_shift, raw + shift, **limits)
    if family != "gpt2":  # rotary positions are relative: transformers may pad either side
        torch.testing.assert_close(transformers_rewards(folder, side="left"), plain, **limits)
    again, _ = new_reward_model(str(folder), config)
    with torch.no_grad():
        rewards = again(batch)
    torch.testing.assert_close(rewards, raw + shift, **limits)
    assert abs(float(rewards.mean())) < limits["atol"]
    assert rewards.std() > 0.1


@pytest.mark.parametrize("bf16", [True, False])
def test_a_shift_makes_the_exported_mean_0_in_float32_however_it_was_trained(bf16, tmp_path):
    config = short_config(bf16=bf16)
    path = save_policy(tmp_path / "policy")
    with tiny.process_group():
        model, tokenizer = new_reward_model(path, config)
        batch = batch_of_rows(tokenizer.pad_token_id)
        update(model, lambda: model(batch).square().mean(), config)
        before = model(batch)
        with torch.no_grad(), fsdp.in_float32(model):
            exact = model(batch)
        assert bf16 == bool((exact - before).abs().max() > 1e-4)
        assert torch.equal(model(batch), before)
        update(model, lambda: model(batch).square().mean(), config)  # it trains on
        with torch.no_grad(), fsdp.in_float32(model):
            shift = -float(model(batch).mean())
        export.save_pretrained(
            model, tiny.vocabulary(of=tokenizer), tmp_path / "model", reward_shift=shift
        )
    assert abs(float(transformers_rewards(tmp_path / "model").mean())) < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_shifts_of_a_reward_model_trained_twice_add_up(family, tmp_path):
    config = short_config()
    first, tokenizer = new_reward_model(save_policy(tmp_path / "policy", family), config)
    batch = batch_of_rows(tokenizer.pad_token_id)
    with torch.no_grad():
        raw = first(batch)
    export.save_pretrained(
        first, tiny.vocabulary(of=tokenizer), tmp_path / "first", reward_shift=2.0
    )
    second, tokenizer = new_reward_model(str(tmp_path / "first"), config)
    for _ in range(2):  # exporting is no change of the model: a second one adds nothing more
        export.save_pretrained(
            second, tiny.vocabulary(of=tokenizer), tmp_path / "second", reward_shift=-0.5
        )
    third, _ = new_reward_model(str(tmp_path / "second"), config)
    with torch.no_grad():
        torch.testing.assert_close(third(batch), raw + 1.5, rtol=0, atol=tiny.rounding(first.lm))


def test_other_ways_to_draw_the_head(tmp_path):
    path = save_policy(tmp_path / "policy", width=512, n_layer=1)
    config = short_config()
    stds = {"stiennon": 513**-0.5, "openrlhf": 1 / 513, "transformers": 0.02, "zeros": 0.0}
    assert set(stds) == {*HEAD_STDS}
    for head_init, std in stds.items():
        model_config = models.read_model_config(path, "trunk", tiny.tokenizer(), config)
        lm = models.load_reward_model(path, model_config, tiny.tokenizer(), config, head_init)
        head = lm.score.weight.detach()
        assert float(head.std()) == pytest.approx(std, rel=4 * (2 * 512) ** -0.5), head_init
    lm.save_pretrained(tmp_path / "trained")
    trained = models.read_model_config(str(tmp_path / "trained"), "trunk", tiny.tokenizer(), config)
    with pytest.raises(UserError, match="--head_init is zeros; it must be stiennon with"):
        models.load_reward_model(
            str(tmp_path / "trained"), trained, tiny.tokenizer(), config, "zeros"
        )


def test_the_trunk_is_the_policy_s_and_a_trained_head_is_kept(tmp_path):
    path = save_policy(tmp_path / "policy")
    model, tokenizer = new_reward_model(path, short_config())
    trunk = AutoModelForCausalLM.from_pretrained(path).transformer
    for name, parameter in trunk.named_parameters():
        target = ranks.whole(model.lm.transformer.get_parameter(name)).cpu()
        assert torch.equal(target, parameter), name
    export.save_pretrained(model, tiny.vocabulary(of=tokenizer), tmp_path / "reward")
    again, _ = new_reward_model(str(tmp_path / "reward"), short_config(seed=5))
    assert torch.equal(ranks.whole(again.lm.score.weight), ranks.whole(model.lm.score.weight))


def test_a_tokenizer_that_pads_with_eos_gets_a_pad_token_of_its_own(tmp_path):
    path = save_policy(tmp_path / "policy", tokenizer=eos_padded_tokenizer())
    config = short_config()
    plain = models.load_tokenizer(path, config)
    assert plain.pad_token_id == plain.eos_token_id == 0
    model, tokenizer = new_reward_model(path, config)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert len(tokenizer) <= model.lm.config.vocab_size
    batch = batch_of_rows(tokenizer.pad_token_id)
    with torch.no_grad():
        expected = model(batch)
    export.save_pretrained(model, tiny.vocabulary(of=tokenizer), tmp_path / "reward")
    # Rows end in eos: with eos as padding transformers would read the score one token too early.
    rewards = transformers_rewards(tmp_path / "reward")
    torch.testing.assert_close(rewards, expected, rtol=0, atol=tiny.rounding(model.lm))
    assert AutoTokenizer.from_pretrained(tmp_path / "reward").pad_token_id == tokenizer.pad_token_id


def test_the_own_pad_token_gets_an_embedding_and_changes_no_other(tmp_path):
    tokenizer = eos_padded_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_special_tokens({"pad_token": "<|padding|>"})
    assert tokenizer.pad_token_id == 300
    path = save_policy(tmp_path / "policy")
    config = short_config()
    model_config = models.read_model_config(path, "trunk", tokenizer, config)
    lm = models.load_reward_model(path, model_config, tokenizer, config)
    before = AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
    after = lm.get_input_embeddings().weight
    assert len(after) == lm.config.vocab_size == 301
    assert torch.equal(after[:300], before)
    assert lm.config.pad_token_id == 300


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a/b/c", "'a/b/c' does not exist"),
        ("output/model", "'output/model' does not exist and is no hub id"),
        ("tests/model_", "'tests/model_' does not exist and is no hub id"),
        ("shape.json", "'shape.json' does not exist"),
    ],
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(path, words, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(sources, "is_reachable", lambda: pytest.fail("asked the hub"))
    with pytest.raises(UserError) as caught:
        models.read_model_config(path, "policy", tiny.tokenizer(), short_config())
    tiny.check_sentence(caught.value, words)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
        ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}}),
        (
            "gemma3_text",
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": LONGROPE | {"original_max_position_embeddings": 32},
                    "sliding_attention": {"rope_type": "default"},
                },
                "head_dim": 8,
            },
        ),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
        ),
    ],
    ids=["phi3", "llama", "by layer type", "dynamic"],
)
def test_angles_of_the_longest_row_are_refused(family, fields, tmp_path):
    """The score of a text would depend on the lengths of the other texts in its batch."""
    tiny.model_config(family, vocab_size=300, **fields).save_pretrained(tmp_path)
    read = functools.partial(models.read_model_config, str(tmp_path), "policy", None)
    read(short_config(max_prompt_length=12))
    with pytest.raises(UserError) as caught:
        read(short_config(max_prompt_length=13))
    tiny.check_sentence(caught.value, "more than the 32 positions")


def tokenizer_with_a_gap(largest: int) -> PreTrainedTokenizerFast:
    """Three tokens, one of which has a far larger id than their number says."""
    backend = Tokenizer(WordLevel({"<|endoftext|>": 0, "a": 1, "b": largest}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.mark.parametrize("kind", ["policy", "trunk"])
def test_ids_without_an_embedding_are_refused_however_few_tokens_there_are(kind, tmp_path):
    path = save_policy(tmp_path / "policy")  # 300 embeddings, 96 positions
    config = short_config(max_prompt_length=76)  # and 20 tokens: to the last position
    models.read_model_config(path, kind, tokenizer_with_a_gap(299), config)
    with pytest.raises(UserError) as caught:
        models.read_model_config(path, kind, tokenizer_with_a_gap(300), config)
    tiny.check_sentence(caught.value, "ids up to 300", "embeddings for 300")


def stops_of(path: str, stop_token: str = "eos") -> list[int]:
    config = short_config(model_name_or_path=path, stop_token=stop_token)
    return models.stop_token_ids(tiny.tokenizer(), config, [path])


def test_stop_tokens(tmp_path):
    newline = tiny.tokenizer()("\n")["input_ids"]
    assert len(newline) == 1
    path = save_policy(tmp_path, eos_token_id=0)
    assert stops_of(path) == [0]
    assert stops_of(path, "\n") == [*newline, 0]
    assert stops_of(path, "\\n") == [*newline, 0]  # as typed in a shell
    assert stops_of(path, "<|endoftext|>") == [0]
    with pytest.raises(UserError) as caught:
        stops_of(path, "zqzq xj")
    tiny.check_sentence(caught.value, "'zqzq xj'", "--stop_token")


def test_a_model_stops_at_every_id_of_its_own_before_and_after_export(tmp_path):
    """As Gemma, Llama 3.1 and GLM-4 list them, the one that is appended to completions first."""
    path = save_policy(tmp_path / "base", eos_token_id=[7, 0])
    (newline,) = tiny.tokenizer()("\n")["input_ids"]
    (tmp_path / "base" / "generation_config.json").unlink()
    assert stops_of(path) == [0, 7]  # of config.json
    GenerationConfig(eos_token_id=[9, 8, 300]).save_pretrained(path)  # the last has no embedding
    assert stops_of(path) == [0, 9, 8]
    assert stops_of(path, "\n") == [newline, 9, 8, 0]
    GenerationConfig(eos_token_id=9).save_pretrained(path)
    assert stops_of(path) == [0, 9]
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [1, 2,}')
    with pytest.raises(UserError, match=r"generation_config.json: .* not a valid JSON"):
        stops_of(path)

    policy = fsdp.shard(
        Policy(AutoModelForCausalLM.from_pretrained(path)), short_config(), distributed.mesh()
    )
    folder = tmp_path / "model"
    export.save_pretrained(policy, tiny.vocabulary([0, 9]), folder)
    assert stops_of(str(folder)) == [0, 9]  # of the next stage
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for last in (0, 9):
        with torch.no_grad():
            plain.lm_head.weight.zero_()
            plain.transformer.ln_f.bias.fill_(1.0)
            plain.lm_head.weight[last] = 1.0  # the most likely token, always
        written = plain.generate(torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=4)
        assert written.tolist() == [[5, 6, last]]


def whole_model(family: str, folder: Path, **text: Any) -> Any:
    """A tiny model of text and images in a folder."""
    shape = {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    if family == "qwen3_5":
        shape["layer_types"] = ["full_attention"]
        vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    default = AutoConfig.for_model(family)
    of_text = {"model_type": default.text_config.model_type, **shape, **text}
    vision["model_type"] = default.vision_config.model_type
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, text_config=of_text, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return whole


FEW_ROWS = {"num_train_rows": 8, "num_eval_rows": 2}


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "internvl"])  # tied; not; by the whole's
def test_the_text_model_of_a_model_of_images_trains_and_loads_alone(family, tmp_path):
    whole = whole_model(family, tmp_path / "whole")
    flags = {"model_name_or_path": str(tmp_path / "whole"), "output_dir": str(tmp_path / "run")}
    flags |= ranks.SHORT_RUN | {"max_steps": 1, "learning_rate": 1e-12, "layout": "padded"}
    flags |= FEW_ROWS
    ranks.launch(ranks.run_stages, 2, tmp_path, jobs=[{"stage": "sft", "flags": flags}])
    lm, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )
    assert not any(report.values())
    assert lm.config.model_type == whole.config.text_config.model_type
    ids = torch.tensor([tiny.random_ids(12, seed=0)])
    with torch.no_grad():
        torch.testing.assert_close(lm(ids).logits, whole.eval()(input_ids=ids).logits)


def test_the_text_model_of_a_model_of_images_becomes_a_reward_model(tmp_path):
    whole = whole_model("gemma3", tmp_path)
    tokenizer = models.load_tokenizer(str(tmp_path), short_config())
    models.add_own_pad_token(tokenizer)
    config = short_config(model_name_or_path=str(tmp_path))
    model_config = models.read_model_config(str(tmp_path), "trunk", tokenizer, config)
    lm = models.load_reward_model(str(tmp_path), model_config, tokenizer, config)
    ids = torch.tensor([tiny.random_ids(12, seed=0)])
    with torch.no_grad():
        states = whole.get_decoder().eval()(ids).last_hidden_state
        torch.testing.assert_close(lm(ids).logits[0], lm.score(states[0, -1]))


def test_a_text_model_that_scales_otherwise_than_the_whole_is_refused(tmp_path):
    whole_model("aya_vision", tmp_path)
    config = short_config(layout="padded", model_name_or_path=str(tmp_path))
    model_config = models.read_model_config(str(tmp_path), "policy", None, config)
    with pytest.raises(UserError) as caught:
        models.load_policy(str(tmp_path), model_config, config)
    tiny.check_sentence(caught.value, "gives other logits than the whole aya_vision")


def test_a_family_without_a_classifier_gets_a_reward_model_that_is_loaded_again(tmp_path, capfd):
    """From a policy, by a stage, and from the stage's folder."""
    lm = tiny.causal_lm("granite", is_plain=True, vocab_size=1024, max_position_embeddings=256)
    lm.save_pretrained(tmp_path / "policy")
    flags = {"model_name_or_path": str(tmp_path / "policy"), "tokenizer_name_or_path": "synthetic"}
    flags |= ranks.SHORT_RUN | {"output_dir": str(tmp_path / "run"), "max_steps": 1}
    flags |= FEW_ROWS | {"num_sft_rows": 4}
    ranks.launch(ranks.run_stages, 2, tmp_path, jobs=[{"stage": "reward", "flags": flags}])
    path, tokenizer = (
        str(tmp_path / "run" / "model"),
        models.load_tokenizer("synthetic", short_config()),
    )
    models.add_own_pad_token(tokenizer)
    config = short_config(model_name_or_path=path)
    model_config = models.read_model_config(path, "reward_model", tokenizer, config)
    classifier = models.load_reward_model(path, model_config, tokenizer, config)
    assert "only this project loads the reward model" in capfd.readouterr().out
    batch = batch_of_rows(tokenizer.pad_token_id)
    reward = RewardModel(classifier)(batch)
    assert reward.std() > 0.1
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        plain = classifier(input_ids=torch.tensor([prompt + completion])).logits.squeeze()
        torch.testing.assert_close(reward[row], plain + RewardModel(classifier).shift)


def test_a_classifier_of_falcon_h1_has_the_buffers_that_its_family_initialises(tmp_path):
    """Of a class of another module than its family's they are left as the memory was."""
    shape = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    tiny.causal_lm("falcon_h1", is_plain=True, **shape).save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer()
    models.add_own_pad_token(tokenizer)
    config = short_config(model_name_or_path=str(tmp_path), layout="padded")
    model_config = models.read_model_config(str(tmp_path), "trunk", None, config)
    lm = models.load_reward_model(str(tmp_path), model_config, tokenizer, config)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for module in (lm, plain):
        assert all((b == 1).all() for n, b in module.named_buffers() if n.endswith("mup_vector"))


def test_adapters_of_a_text_model_in_a_whole_are_refused(tmp_path):
    """Their names would not fit the whole, from which peft loads the base."""
    whole_model("gemma3", tmp_path)
    config = short_config(model_name_or_path=str(tmp_path), lora_r=4)
    with pytest.raises(UserError) as caught:
        models.read_model_config(str(tmp_path), "policy", None, config)
    tiny.check_sentence(caught.value, "--lora_r", "would not fit the whole")
