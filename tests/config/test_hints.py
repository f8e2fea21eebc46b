"""Claim: docs/from-trl.md has every flag of TRL, and whoever gives one here is answered with ours.

Held against TRL's own config classes, against the flags that our scripts have, and against the
table of `hints.py`. About `common.config.hints`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.config.hints import OTHER_NAMES, PAGES, SETTINGS, counterparts, instead
from common.config.parser import parse
from common.errors import UserError
from experiments.runs.stages import config_class

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-trl.md"
NAMES = r"(`\w+`(?:, `\w+`)*)"
ROW = re.compile(rf"\| {NAMES} \| (.+?) \| (.+) \|")  # TRL's flags, ours, a note
ABSENT = re.compile(rf"- {NAMES}: (.+)")  # flags without a counterpart, and the reason
GONE = re.compile(r"^ *\| (`--.+?) \| (.+?) \|$", re.MULTILINE)  # flags of before, what to write
SAME = re.compile(r"The same here: (.+)")  # flags of the same name, with differences in brackets
STAGES = {
    "sft": "train_sft.py",
    "reward model": "train_reward.py",
    "dpo": "train_dpo.py",
    "grpo": "train_grpo.py",
}
VALUES = {name for name in SETTINGS if "=" in name}  # which have another word than the flag's
EVERY, SEVERAL, SCRIPTS = "all four stages", "several stages", "trl's scripts"


class Row(NamedTuple):
    """A flag of TRL on the page."""

    section: str  # in lower case; the stage's name in its own section
    flag: str
    here: str  # our flags, as "--lora_r"; a dash where there is none
    note: str


def read_page() -> list[Row]:
    rows, section = [], ""
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"## Where your numbers will differ.*?(?=\n## )", "", text, flags=re.DOTALL)
    wrapped = r"(?<=[^\n])\n *(?=[^\n#| -])"
    for line in re.sub(wrapped, " ", text).splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").lower()
        elif same := SAME.match(line):
            listed = re.sub(r"\([^()]*\)", "", same[1].partition(". ")[0])
            names = re.findall(r"`(\w+)`", listed)
            rows += [Row(section, name, f"--{name}", line) for name in names]
        elif absent := ABSENT.fullmatch(line):
            names = re.findall(r"\w+", absent[1])
            rows += [Row(section, name, "\N{EN DASH}", absent[2]) for name in names]
        elif row := ROW.fullmatch(line):
            here, note = (cell.replace("`", "") for cell in row.groups()[1:])
            rows += [Row(section, name, here, note) for name in re.findall(r"\w+", row[1])]
    return rows


def flags_in(section: str) -> set[str]:
    flags = [row.flag for row in read_page() if row.section == section]
    assert len(flags) == len(set(flags)), f"a flag is twice in {section!r}"
    return set(flags)


def fields_of(*classes: Any) -> set[str]:
    return {f.name for cls in classes for f in dataclasses.fields(cls)}


def test_the_page_has_every_flag_of_trl_and_no_other() -> None:
    trl = pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed")
    from trl.scripts.grpo import GRPOScriptArguments

    classes = (trl.SFTConfig, trl.RewardConfig, trl.DPOConfig, trl.GRPOConfig)
    of_all, of_several = flags_in(EVERY), flags_in(SEVERAL)
    for stage, cls in zip(STAGES, classes, strict=True):
        shared = of_all | of_several & fields_of(cls)
        assert flags_in(stage) | shared == fields_of(cls), stage
        assert not flags_in(stage) & shared, stage
    for flag in of_several:
        assert 2 <= sum(flag in fields_of(cls) for cls in classes) <= 3, flag
    of_scripts = fields_of(trl.ModelConfig, trl.DatasetMixtureConfig, GRPOScriptArguments)
    assert flags_in(SCRIPTS) == of_scripts
    all_flags = of_scripts | fields_of(*classes)
    assert not flags_in("earlier releases of trl and transformers") & all_flags


def test_what_the_page_names_is_a_flag_that_the_stage_uses() -> None:
    classes = {stage: config_class(script) for stage, script in STAGES.items()}
    used = {stage: fields_of(cls) for stage, cls in classes.items()}
    every = set.intersection(*used.values())
    by_section = {**used, EVERY: every} | dict.fromkeys([SCRIPTS], set.union(*used.values()))
    for row in read_page():
        allowed = by_section.get(row.section, set.union(*used.values()))
        named = set(re.findall(r"--(\w+)", row.here))
        assert named <= allowed, (row.section, row.flag)
        assert named or row.here == "\N{EN DASH}", row
        in_notes = set(re.findall(r"--(\w+)", row.note))
        assert in_notes <= set.union(*used.values(), fields_of(config_class("evaluate.py"))), row
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    elsewhere = {"config", "standalone", "nproc_per_node"}
    in_prose = set(re.findall(r"--(\w+)", prose)) - elsewhere
    assert in_prose <= set.union(*used.values(), fields_of(config_class("evaluate.py")))


def test_the_rows_of_the_page_and_of_the_code_are_the_same() -> None:
    renamed = {row.flag: row for row in read_page() if f"--{row.flag}" != row.here}
    for row in renamed.values():
        names = re.findall(r"--(\w+)", row.here)
        if row.flag in SETTINGS:
            assert instead(row.flag, "", names) == row.here, row
            assert not instead(row.flag, "", []), row
            continue
        assert counterparts(row.flag, names) == names, row
        assert not counterparts(row.flag, names[1:]), row
    gone = {
        name
        for flags, text in GONE.findall((PAGE.parents[1] / "CHANGELOG.md").read_text())
        for name in re.findall(r"--(\w+)", flags)
        if "--" in text
    }
    in_code = [*" ".join(OTHER_NAMES.values()).split(), *SETTINGS.keys() - VALUES]
    assert len(in_code) == len({*in_code})
    assert {*in_code} <= {*renamed, *gone}


def refusal(script: str, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(config_class(script), ["--output_dir", "x", "--model_name_or_path", "y", *words])
    return str(caught.value)


@pytest.mark.parametrize(
    ("script", "flag", "ours"),
    [
        ("train_sft.py", "--per_device_train_batch_size=4", "--batch_size"),
        ("train_sft.py", "--gradient-accumulation-steps", "--batch_size"),
        ("train_dpo.py", "--use_peft", "--lora_r"),
        ("train_dpo.py", "--max_length", "--max_prompt_length and --max_completion_length"),
        ("train_grpo.py", "--loss_type", "--aggregation and --policy_objective"),
    ],
)
def test_a_flag_of_trl_is_answered_with_ours(script: str, flag: str, ours: str) -> None:
    name = flag[2:].replace("-", "_")
    hint = f"{name.partition('=')[0]} is {ours} here, see docs/from-trl.md and CHANGELOG.md."
    assert refusal(script, flag) == f"unknown argument '--{name}': {hint}"


@pytest.mark.parametrize(
    ("script", "words", "written"),
    [
        ("train_grpo.py", ["--epsilon_high", "0.28"], "--policy_objective clip:epsilon_high=0.28"),
        ("train_grpo.py", ["--epsilon-high=0.28"], "--policy_objective clip:epsilon_high=0.28"),
        (
            "train_grpo.py",
            ["--epsilon"],
            "--policy_objective clip:epsilon_low=VALUE,epsilon_high=VALUE",
        ),
        ("train_grpo.py", ["--scale_rewards", "false"], "--advantages none"),
        ("train_grpo.py", ["--scale_rewards", "batch", "--bf16"], "--advantages batch"),
        (
            "train_grpo.py",
            ["--importance_sampling_level", "sequence"],
            "--policy_objective gspo:epsilon_low=0.2,epsilon_high=0.2",
        ),
        ("train_grpo.py", ["--objective_args", "cap=2"], "--policy_objective NAME:cap=2"),
        ("train_dpo.py", ["--objective_args", "gamma=1"], "--loss_type NAME:gamma=1"),
        ("train_dpo.py", ["--gamma", "1"], "--loss_type simpo:gamma=1"),
        ("train_dpo.py", ["--label_smoothing", "0.1"], "--loss_type sigmoid:label_smoothing=0.1"),
    ],
)
def test_a_setting_is_answered_with_what_to_write(
    script: str, words: list[str], written: str, tmp_path: Path
) -> None:
    assert f": write {written}; settings stand behind" in refusal(script, *words)
    flag, _, value = " ".join(words[:2]).replace(" ", "=").lstrip("-").partition("=")
    (recipe := tmp_path / "recipe.yaml").write_text(f"{flag}: {value or 'VALUE'}\n")
    assert f": write {written}; " in refusal(script, "--config", str(recipe))
    names = {part[2:] for part in written.split() if part.startswith("--")}
    assert names <= fields_of(config_class(script))


@pytest.mark.parametrize(
    ("script", "words", "written"),
    [
        ("train_grpo.py", "--policy_objective gspo --epsilon_high 4e-4", "gspo:epsilon_high=4e-4"),
        (
            "train_grpo.py",
            "--policy_objective dppo:delta=3 sampler_drift --epsilon_low 0.1",
            "dppo:delta=3,epsilon_low=0.1 sampler_drift",
        ),
        (
            "train_grpo.py",
            "--policy_objective gspo --sampler_correction_cap 3",
            "gspo sampler_weights:cap=3",
        ),
        ("train_grpo.py", "--policy_objective sapo --epsilon_low 0.1", "clip:epsilon_low=0.1"),
        ("train_grpo.py", "--advantages rloo --scale_rewards group", "rloo:scale=group"),
        (
            "train_dpo.py",
            "--loss_type robust sft --label_smoothing 0.1",
            "robust:label_smoothing=0.1 sft",
        ),
        ("train_grpo.py", "--epsilon_high 0.28 stray", "clip:epsilon_high=0.28;"),
        ("train_grpo.py", "--advantages rloo --scale_rewards mean", "--advantages mean;"),
        (
            "train_grpo.py",
            "--policy_objective mine.py:f:a=1 --sampler_correction_cap 2",
            "mine.py:f:a=1 sampler_weights:cap=2",
        ),
        (
            "train_grpo.py",
            "--policy_objective gspo sampler_weights --vllm_importance_sampling_correction true",
            "--policy_objective gspo sampler_weights;",
        ),
    ],
)
def test_a_setting_goes_behind_the_function_that_has_it(
    script: str, words: str, written: str, tmp_path: Path
) -> None:
    assert f" {written}" in refusal(script, *words.split())
    if "--" in words[2:] and "stray" not in words:
        recipe = tmp_path / "recipe.yaml"
        *named, flag, value = words.split()
        recipe.write_text(f"{named[0][2:]}: {list(named[1:])}\n{flag[2:]}: {value}\n")
        assert f" {written}" in refusal(script, "--config", str(recipe))


@pytest.mark.parametrize(
    ("script", "flag", "value"),
    [
        ("train_grpo.py", "epsilon_low", "-1.0"),
        ("train_grpo.py", "scale_rewards", "''"),
        ("train_grpo.py", "objective_args", "[]"),
        ("train_dpo.py", "objective_args", "[]"),
        ("train_dpo.py", "label_smoothing", "0.0"),
        ("train_grpo.py", "sampler_correction", "none"),
        ("train_grpo.py", "epsilon_high", "-1"),
        ("train_grpo.py", "off_policy_mask_threshold", "0.00"),
        ("train_grpo.py", "sampler_drift_coef", "0"),
        ("train_grpo.py", "importance_sampling_level", "token"),
        ("train_grpo.py", "vllm_importance_sampling_correction", "false"),
    ],
)
def test_a_flag_that_did_nothing_is_to_be_left_out(
    script: str, flag: str, value: str, tmp_path: Path
) -> None:
    (recipe := tmp_path / "config.yaml").write_text(f"{flag}: {value}\n")
    sentence = refusal(script, "--config", str(recipe))
    assert sentence.endswith(f"'{flag}': leave it out, it did nothing.")


def test_a_setting_of_another_stage_is_answered_without_its_objective() -> None:
    assert "write" not in refusal("train_sft.py", "--epsilon_high", "0.28")


def test_a_flag_that_nothing_here_replaces_is_answered_with_the_page() -> None:
    for row in read_page():
        if row.here == "\N{EN DASH}" and row.section in STAGES:
            flags = fields_of(config_class(STAGES[row.section]))
            assert not counterparts(row.flag, [*flags]), row
    for flag in ("packing", "zzz"):
        assert refusal("train_sft.py", f"--{flag}") == f"unknown argument '--{flag}' ({PAGES})."


def test_all_unknown_flags_of_a_pasted_command_are_named_at_once() -> None:
    arguments = ("--use_peft", "--packing", "true", "--save_total_limit=3", "--bf16", "true")
    sentence = refusal("train_sft.py", *arguments)
    assert sentence.startswith("unknown argument '--use_peft': use_peft is --lora_r here")
    assert sentence.endswith("; also unknown: --packing, --save_total_limit.")


def test_a_recipe_is_answered_like_a_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "trl.yaml"
    recipe.write_text("per_device_train_batch_size: 8\npacking: true\nbf16: true\nlr: 1\n")
    sentence = refusal("train_sft.py", "--config", str(recipe))
    assert "'per_device_train_batch_size': per_device_train_batch_size is --batch_size" in sentence
    assert sentence.endswith("; also unknown: packing, lr.")


def test_a_misspelt_name_is_answered_with_ours() -> None:
    typo = f"unknown argument '--Learnig_rate' (did you mean learning_rate? {PAGES})."
    assert refusal("train_sft.py", "--Learnig-rate") == typo
    assert refusal("train_dpo.py", "--loss_type", "hing").endswith("(did you mean hinge?).")


@pytest.mark.parametrize(
    ("value", "ending"),
    [("cosin", " (did you mean cosine?)."), ("Linear", " (did you mean linear?)."), ("poly", ".")],
)
def test_a_misspelt_choice_is_answered_with_the_nearest(tmp_path: Path, value: str, ending: str):
    """Of a flag and of a recipe's key; one that is like no choice gets their list alone."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"lr_scheduler_type: {value}\n")
    choices = "['cosine', 'linear', 'constant']"
    for words in (["--lr_scheduler_type", value], ["--config", str(recipe)]):
        sentence = refusal("train_sft.py", "--output_dir", "unused", *words)
        needed = f"it must be one of {choices}{ending}"
        assert sentence == f"--lr_scheduler_type is {value!r}; {needed}"
