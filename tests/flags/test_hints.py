"""Claim: docs/from-trl.md has every flag of TRL, and whoever gives one here is answered from it.

Held against TRL's own config classes, and against the flags that our scripts have.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.flags import hints
from common.flags.hints import config_class, read_page
from common.flags.parser import parse

STAGES = {
    "sft": "train_sft.py",
    "reward model": "train_reward.py",
    "dpo": "train_dpo.py",
    "grpo": "train_grpo.py",
}
EVERY, SCRIPTS = "all four stages", "trl's scripts"


def flags_in(section: str) -> set[str]:
    found = [row.flag for row in read_page() if row.section == section]
    assert len(found) == len(set(found)), f"a flag is twice in {section!r}"
    return set(found)


def fields_of(*classes: Any) -> set[str]:
    return {f.name for cls in classes for f in dataclasses.fields(cls)}


def test_the_page_has_every_flag_of_trl_and_no_other() -> None:
    trl = pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed")
    from trl.scripts.grpo import GRPOScriptArguments

    classes = (trl.SFTConfig, trl.RewardConfig, trl.DPOConfig, trl.GRPOConfig)
    of_all = flags_in(EVERY)
    for stage, cls in zip(STAGES, classes, strict=True):
        assert flags_in(stage) | of_all == fields_of(cls), stage
        assert not flags_in(stage) & of_all, stage
    of_scripts = fields_of(trl.ModelConfig, trl.DatasetMixtureConfig, GRPOScriptArguments)
    assert flags_in(SCRIPTS) == of_scripts
    known = of_scripts | fields_of(*classes)
    assert not flags_in("earlier releases of trl and transformers") & known


def test_what_the_page_names_is_a_flag_that_the_stage_uses() -> None:
    classes = {stage: config_class(script) for stage, script in STAGES.items()}
    used = {stage: fields_of(cls) - set(cls.unused) for stage, cls in classes.items()}
    every = set.intersection(*used.values())
    by_section = {**used, EVERY: every} | dict.fromkeys([SCRIPTS], set.union(*used.values()))
    for row in read_page():
        known = by_section.get(row.section, set.union(*used.values()))
        named = set(re.findall(r"--(\w+)", row.here))
        assert named <= known, (row.section, row.flag)
        assert named or row.here == "\N{EN DASH}", row
        in_notes = set(re.findall(r"--(\w+)", row.note))
        assert in_notes <= set.union(*used.values(), fields_of(config_class("evaluate.py"))), row


def refusal(script: str, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(config_class(script), ["--output_dir", "x", "--model_name_or_path", "y", *words])
    return str(caught.value)


@pytest.mark.parametrize(
    ("script", "flag", "told"),
    [
        ("train_sft.py", "--per_device_train_batch_size=4", "here it is --batch_size (global: "),
        ("train_sft.py", "--gradient-accumulation-steps", "here it is --batch_size (global: "),
        ("train_dpo.py", "--save_total_limit", "here it is --keep_last ("),
        ("train_dpo.py", "--use_peft", "here it is --lora_r (above 0"),
        ("train_sft.py", "--packing", "with none here (a pass is filled by"),
        ("train_grpo.py", "--deepspeed", "with none here (FSDP2 shards"),
        ("train_dpo.py", "--max_length", "--max_prompt_length and --max_completion_length (apart"),
        ("train_sft.py", "--max_seq_length", "--max_prompt_length and --max_completion_length (a"),
        ("train_sft.py", "--attn_implementation", "here it is --layout ("),
        ("train_sft.py", "--loss_type", "with none here (the token mean"),  # and no flag of DPO's
        ("train_grpo.py", "--loss_type", "here it is --aggregation and --policy_objective ("),
        ("train_sft.py", "--per_device_train_batchsize", "TRL's per_device_train_batch_size; here"),
        ("evaluate.py", "--save_total_limit", "--keep_last of train_dpo.py, train_grpo.py, train_"),
    ],
)
def test_a_flag_of_trl_is_answered_with_ours(script: str, flag: str, told: str) -> None:
    sentence = refusal(script, flag)
    assert sentence.startswith(f"unknown argument '--{flag[2:].replace('-', '_')}'")
    assert ": TRL's" in sentence
    assert told in sentence
    assert sentence.endswith("; see docs/from-trl.md.")


@pytest.mark.parametrize(
    ("script", "flag", "choice", "told"),
    [
        ("train_dpo.py", "loss_type", "sigmoid_norm", "means per token are ipo_mean's and simpo's"),
        ("train_dpo.py", "loss_type", "sft", "is --sft_weight"),
        ("train_sft.py", "lr_scheduler_type", "cosine_with_min_lr", "cosine with --min_lr"),
        ("train_grpo.py", "scale_rewards", "false", "none, TRL's false"),
    ],
)
def test_a_choice_of_trl_that_is_not_here_is_answered_from_the_page(
    script: str, flag: str, choice: str, told: str
) -> None:
    sentence = refusal(script, f"--{flag}", choice)
    assert sentence.startswith(f"--{flag} is '{choice}'; it must be one of ")
    assert told in sentence
    assert sentence.endswith("; see docs/from-trl.md.")


def test_the_page_names_every_loss_of_dpo() -> None:
    trl = pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed")
    losses = re.findall(
        r"`'(\w+)'`", trl.DPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    )
    assert "sigmoid_norm" in losses
    for loss in set(losses) - {"sigmoid", "robust", "hinge", "ipo"}:  # ours too
        assert refusal("train_dpo.py", "--loss_type", loss).endswith("; see docs/from-trl.md."), (
            loss
        )


def test_all_unknown_flags_of_a_pasted_command_are_named_at_once() -> None:
    given = ("--use_peft", "--packing", "true", "--save_total_limit=3", "--bf16", "true")
    sentence = refusal("train_sft.py", *given)
    assert sentence.startswith("unknown argument '--use_peft': TRL's; here it is --lora_r ")
    assert sentence.endswith("; also unknown: --packing, --save_total_limit.")


def test_a_flag_of_another_script_is_answered_with_that_script() -> None:
    told = ": a flag of train_dpo.py, train_grpo.py, evaluate.py."
    assert refusal("train_sft.py", "--num_generations", "8").endswith(told)
    assert refusal("train_sft.py", "--stage", "x").endswith("(see --help for the flags).")
    every = ": a flag of train_dpo.py, train_grpo.py, train_reward.py, train_sft.py."
    assert refusal("evaluate.py", "--max_steps", "8").endswith(every)


def test_a_recipe_is_answered_like_a_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "trl.yaml"
    recipe.write_text("per_device_train_batch_size: 8\npacking: true\nbf16: true\nlr: 1\n")
    sentence = refusal("train_sft.py", "--config", str(recipe))
    assert "the unknown key 'per_device_train_batch_size': TRL's; here it is --batch_" in sentence
    assert sentence.endswith("; also unknown: packing, lr.")


@pytest.mark.parametrize(
    ("script", "pairs"),
    [
        (
            "train_sft.py",
            "lr learning_rate, epochs num_train_epochs, batch batch_size, model model_name_or_path,"
            "dataset dataset_name, tokenizer tokenizer_name_or_path, lora_rank lora_r,"
            "train_batch_size batch_size, steps max_steps, Learnig-rate learning_rate",
        ),
        ("train_dpo.py", "refmodel ref_model_name_or_path"),
        ("evaluate.py", "models reward_models"),
    ],
)
def test_a_short_or_misspelt_name_is_answered_with_ours(script: str, pairs: str) -> None:
    for pair in pairs.split(","):
        given, meant = pair.split()
        assert refusal(script, f"--{given}").endswith(f"(did you mean {meant}?)."), given


def test_a_typo_of_ours_is_ours_and_without_the_page_all_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typo = "unknown argument '--learning_rte' (did you mean learning_rate?)."
    assert refusal("train_sft.py", "--learning_rte") == typo
    monkeypatch.setattr(hints, "PAGE", tmp_path / "from-trl.md")
    assert refusal("train_sft.py", "--learning_rte") == typo
    assert refusal("train_sft.py", "--save_total_limit").endswith("(see --help for the flags).")


def test_every_flag_of_the_page_that_a_script_lacks_is_answered_from_it() -> None:
    for stage, script in STAGES.items():
        cls = config_class(script)
        known = [f.name for f in dataclasses.fields(cls)]
        for row in read_page():
            if row.section in (EVERY, stage) and row.flag not in known:
                answered = hints.answer([f"--{row.flag}"], cls, known)
                assert row.note in answered, (script, row.flag)
