"""Claim: what other tools save with a model changes no number, and what cannot be read is named.

A folder whose config has switches of a forward pass, kernels that are not installed or ids of no
token gives the scores of the clean one, in both layouts, and is exported without them. A config
given as a file means the same as in a folder. About `common.model.load` and `common.model.checks`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mistakes
import pytest
import tiny
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from common import distributed
from common.batch import padded_batch, shared_prefix_batch
from common.checkpoint import export
from common.errors import UserError
from common.forward import Policy, RewardModel
from common.model import checks, fsdp, load
from common.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("process_group")

PROMPTS = [[n % 50 + 2 for n in tiny.random_ids(k, seed=k)] for k in (7, 2, 11)]
COMPLETIONS = [[[*tiny.random_ids(k, seed=90 + k), 0]] for k in (4, 6, 1)]  # id 0: eos
FAMILIES = {
    "gpt2": {},
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
LEFTOVERS: list[dict[str, Any]] = [
    {"output_hidden_states": True, "output_attentions": True, "return_dict": False},
    {"return_dict": None, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    {"torchscript": True, "use_cache": False, "return_dict_in_generate": True},
    {"attn_implementation": "flash_attention_2", "experts_implementation": "mine"},
    {"_attn_implementation": "a/kernel", "_experts_implementation": "grouped_mm"},
    {"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": -1},
    {"pad_token_id": 5000, "bos_token_id": None, "eos_token_id": [-1, 5000]},
    {"eos_token_id": [], "architectures": [None], "dtype": "bfloat16", "problem_type": None},
    {"torch_dtype": "float16", "transformers_version": "3.0.2", "_name_or_path": "/not/here"},
    {"max_length": 9, "temperature": 0, "num_beams": 0, "suppress_tokens": [3], "unknown": {}},
    {"gradient_checkpointing": True, "num_labels": 3, "attention_dropout": 0.5, "attn_pdrop": 0.5},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and a reward model of each family."""
    root = tmp_path_factory.mktemp("clean")
    for family, fields in FAMILIES.items():
        shape = fields | {"vocab_size": 300, "is_plain": True}
        tiny.save(tiny.causal_lm(family, **shape), root / family / "policy")
        tiny.save(tiny.classifier(family, pad_id=1, **shape), root / family / "judge")
    return root


def scores(folder: Path, kind: checks.Kind, layout: str) -> tuple[Any, Tensor]:
    """A loaded model, sharded as in a stage, and its scores of the completions."""
    config = tiny.train_config(layout=layout, max_prompt_length=40, max_completion_length=20)
    tokenizer = tiny.tokenizer()
    model_config = load.read_model_config(str(folder), kind, tokenizer, config)
    if kind == "policy":
        module: Any = Policy(load.load_policy(str(folder), model_config, config, trains=True))
    else:
        module = RewardModel(load.load_reward_model(str(folder), model_config, tokenizer, config))
    module = fsdp.shard(module, config, distributed.mesh())
    make = padded_batch if layout == "padded" else shared_prefix_batch
    with torch.no_grad():
        output = module(make(PROMPTS, COMPLETIONS, 1).to(distributed.device()))
    return module, output.token_logps if kind == "policy" else output


def with_fields(folder: Path, source: Path, file: str = "config.json", **fields: Any) -> Path:
    """A copy of a model's folder with other values in one of its files."""
    shutil.copytree(source, folder)
    mistakes.change(folder / file, **fields)
    return folder


@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_other_tools_leave_in_a_config_changes_no_score(folders, tmp_path, family, layout):
    sources: list[tuple[str, checks.Kind]] = [("policy", "policy"), ("judge", "reward_model")]
    for name, kind in sources:
        _, expected = scores(folders / family / name, kind, layout)
        for number, fields in enumerate(LEFTOVERS):
            if kind == "reward_model":  # these make it another model
                fields = {k: fields[k] for k in fields if k not in ("architectures", "num_labels")}
            folder = with_fields(tmp_path / name / f"{number}", folders / family / name, **fields)
            module, values = scores(folder, kind, layout)
            assert torch.equal(values, expected), fields
            exported = json.loads(export.settings_of(module.lm, tiny.vocabulary())["config.json"])
            assert {k: exported.get(k, v) for k, v in checks.RETURNED.items()} == checks.RETURNED


def test_a_mixture_samples_whatever_its_config_returns(folders, tmp_path):
    drawn = []
    switches = {"output_router_logits": True, "return_dict": False, "output_attentions": True}
    for fields in ({}, switches):
        source = folders / "mixtral" / "policy"
        folder = with_fields(tmp_path / f"{len(drawn)}", source, **fields)
        module, _ = scores(folder, "policy", "padded")
        config = tiny.train_config(layout="padded", max_completion_length=6)
        examples = tiny.ragged_examples([(7,), (2,), (11,)])
        rollouts = Sampler(module, tiny.vocabulary(), config).sample(examples, num_samples=2)
        drawn.append(rollouts.completion_ids)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (-1, [0]),
        (None, [0]),
        ([], [0]),
        ([5, -1, 5000, None], [0, 5]),
        ([5.0, 7], [0, 5, 7]),
        ("5", "has '5' as a token's id"),
        (["<eos>"], "has '<eos>' as a token's id"),
        ([[5]], "has [5] as a token's id"),
        (5.5, "has 5.5 as a token's id"),
        (False, "has False as a token's id"),
    ],
)
def test_a_model_stops_at_tokens_only(folders, tmp_path, stops, expected):
    source = folders / "llama" / "policy"
    folder = with_fields(tmp_path / "x", source, "generation_config.json", eos_token_id=stops)
    config = tiny.train_config(model_name_or_path=str(folder))
    if isinstance(expected, list):
        assert load.load_vocabulary(config).stop_ids == expected
        return
    with pytest.raises(UserError) as refusal:
        load.load_vocabulary(config)
    tiny.check_sentence(refusal.value, f"{folder}/generation_config.json", expected)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "no JSON",
        '{"pad_token_id": [1]}',
        '{"max_new_tokens": -1}',
        '{"num_return_sequences": 4}',
        '{"cache_implementation": "mine"}',
        '{"compile_config": 1}',
    ],
)
def test_settings_of_generation_that_transformers_cannot_read_are_named(folders, tmp_path, content):
    folder = with_fields(tmp_path / "x", folders / "gpt2" / "policy")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UserError) as refusal:
        load.load_vocabulary(tiny.train_config(model_name_or_path=str(folder)))
    tiny.check_sentence(refusal.value, f"{folder}/generation_config.json: ")


@pytest.mark.parametrize(
    "names", [None, [], ["LlamaModel"], ["BertForMaskedLM"], "LlamaForCausalLM"]
)
def test_a_trained_head_is_not_lost_where_the_config_names_no_classifier(folders, tmp_path, names):
    folder = with_fields(tmp_path / "x", folders / "llama" / "judge", architectures=names)
    with pytest.raises(UserError, match="have a `score` head, but .* LlamaForSequenceClassif"):
        scores(folder, "trunk", "padded")


# ---- a config as a file --------------------------------------------------------------------------

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0}
SAVED = {"architectures": ["X"], "torch_dtype": "bfloat16", "transformers_version": "4.40.1"}
SAVED |= {"use_cache": False, "_name_or_path": "owner/name", "_model_name_or_path": "owner/name"}
OF_LLAMA = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1}
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 300.0, "rope_scaling": None, **OF_LLAMA, **SAVED},
    "llama 2": {"rope_scaling": {"type": "linear", "factor": 2.0}, "pad_token_id": 32000, **SAVED},
    "llama 3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0} | SCALED},
    "qwen2": {"rope_theta": 1e6, "use_mrope": False, "use_sliding_window": False, **SAVED},
    "mistral": {"rope_theta": 1e5, "sliding_window": 4096, "torch_dtype": "bfloat16"},
    "gpt_neox": {"rotary_emb_base": 200, "rotary_pct": 0.5, **SAVED},
    "phi": {"partial_rotary_factor": 0.5, "rope_theta": 200.0, "max_length": 9, **SAVED},
}


def frequencies(model_config: Any) -> Tensor:
    lm = AutoModelForCausalLM.from_config(model_config)
    (values,) = [module.inv_freq for module in lm.modules() if hasattr(module, "inv_freq")]
    return values


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_means_the_same_as_a_file_and_in_a_folder(tmp_path, name):
    fields = {"model_type": name.split()[0], **SHAPE, **CONFIGS[name]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    file = tmp_path / "config.json"
    model_config = load.find_config(str(file), tiny.tokenizer(), tiny.train_config())
    by_transformers = AutoConfig.from_pretrained(tmp_path)
    by_transformers.pad_token_id = None
    plain = {k: v for k, v in fields.items() if not k.startswith(("rope", "rot", "pa"))}
    assert torch.equal(frequencies(model_config), frequencies(by_transformers))
    assert not torch.equal(frequencies(model_config), frequencies(AutoConfig.for_model(**plain)))


def test_gpt_2_s_published_config_is_read_as_a_file(tmp_path):
    fields = {"model_type": "gpt2", "n_ctx": 64, "n_embd": 8, "n_head": 1, "n_layer": 1}
    fields |= {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    (tmp_path / "gpt2.json").write_text(json.dumps(fields))
    assert load.find_config(str(tmp_path / "gpt2.json"), None, tiny.train_config()).n_embd == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_szie": 8}, "perhaps 'hidden_size' is meant."),
        ({"hidden_szie": 8, **SAVED}, "perhaps 'hidden_size' is meant."),
        ({"rope_tetha": 8.0, **SAVED}, "perhaps 'rope_theta' is meant."),
        ({"torch_dytpe": "float16", **SAVED}, "perhaps 'torch_dtype' is meant."),
        ({"layers": 8}, "which no llama has."),
        ([], "it must be a JSON object."),
    ],
)
def test_a_misspelt_field_is_refused_whoever_wrote_the_file(tmp_path, fields, reason):
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(fields and {"model_type": "llama", **fields}))
    with pytest.raises(UserError) as refusal:
        load.find_config(str(file), tiny.tokenizer(), tiny.train_config())
    tiny.check_sentence(refusal.value, reason)
