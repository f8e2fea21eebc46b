"""The answer to an unknown flag: the one with another name here, or the nearest."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from common.errors import hint

NOTHING: Mapping[str, Sequence[Any]] = MappingProxyType({})
# Flags of TRL, transformers and older clones by ours that do the same; docs/from-trl.md and
# CHANGELOG.md have the differences
OTHER_NAMES = {
    "advantages": "multi_objective_aggregation advantage_baseline",
    "aggregation policy_objective": "loss_type",
    "batch_size": "per_device_train_batch_size gradient_accumulation_steps",
    "bf16": "fp16 bf16_full_eval fp16_full_eval dtype torch_dtype",
    "compile": "torch_compile torch_compile_mode compile_mode",
    "cpu_offload shard_gradients": "fsdp_config",
    "dataset_test_split": "do_eval test_split_size",
    "ddp_timeout": "vllm_server_timeout",
    "eval_steps": "eval_strategy evaluation_strategy",
    "generation_batch_size": "generation_cache_tokens",
    "gradient_checkpointing": "activation_checkpointing activation_offloading",
    "keep_last": "save_total_limit load_best_model_at_end metric_for_best_model",
    "kl_estimator": "use_bias_correction_kl kl_in kl_correction",
    "layout": "attn_implementation",
    "logging_steps": "logging_strategy logging_first_step",
    "lora_alpha": "use_rslora",
    "lora_r": "use_peft",
    "loss_type loss_weights": "rpo_alpha sft_weight",
    "max_completion_length": "max_target_length",
    "max_prompt_length max_completion_length": "max_length max_seq_length vllm_max_model_length",
    "micro_batch_tokens": "auto_find_batch_size per_device_eval_batch_size "
    "precompute_ref_batch_size",
    "min_lr": "lr_scheduler_kwargs",
    "num_minibatches": "steps_per_generation",
    "num_replicas": "parallelism_config",
    "num_sample_prompts": "num_completions_to_print log_unique_prompts",
    "output_dir": "logging_dir",
    "prompt_truncation": "truncation_mode prompt_cue",
    "ref_mixup_alpha": "ref_model_mixup_alpha",
    "ref_update_steps": "sync_ref_model ref_model_sync_steps",
    "rejection_method": "distinct_candidates",
    "reshard_after_forward": "fsdp",
    "resume_from_checkpoint": "overwrite_output_dir",
    "reward_funcs": "reward_model_name_or_path overlong_buffer",
    "rollout_server": "use_vllm vllm_server_base_url vllm_server_host vllm_server_port",
    "sample_steps": "log_completions generate_during_eval",
    "save_steps": "save_strategy",
    "seed": "data_seed",
    "stop_token": "eos_token",
    "tokenizer_name_or_path": "chat_template_path",
    "warmup_steps": "warmup_ratio",
}
# The same for settings of objectives, which stand behind a name: what to write for a flag, or for
# one of its values. Another value takes the place of {}.
SETTINGS = {
    "delta": "--policy_objective clip:delta={}",
    "epsilon": "--policy_objective clip:epsilon_low={},epsilon_high={}",
    "epsilon_high": "--policy_objective clip:epsilon_high={}",
    "epsilon_low": "--policy_objective clip:epsilon_low={}",
    "gamma": "--loss_type simpo:gamma={}",
    "importance_sampling_level": "--policy_objective gspo:epsilon_low=0.2,epsilon_high=0.2",
    "label_smoothing": "--loss_type sigmoid:label_smoothing={}",
    "off_policy_mask_threshold": "--policy_objective clip off_policy_mask:threshold={}",
    "ratio_level": "--policy_objective cispo:ratio_level={}",
    "sampler_correction": "--policy_objective clip sampler_weights:correction={}",
    "sampler_correction=geometric_mask": "--policy_objective clip geometric_mask",
    "sampler_correction_cap": "--policy_objective clip sampler_weights:cap={}",
    "sampler_correction_floor": "--policy_objective clip sampler_weights:floor={}",
    "sampler_drift_coef": "--policy_objective clip sampler_drift:coef={}",
    "sapo_temperature_neg": "--policy_objective sapo:tau_neg={}",
    "sapo_temperature_pos": "--policy_objective sapo:tau_pos={}",
    "scale_rewards=false": "--advantages none",
    "scale_rewards=true": "--advantages group",
    "scale_rewards": "--advantages {}",
    "vllm_importance_sampling_cap": "--policy_objective clip sampler_weights:cap={}",
    "vllm_importance_sampling_clip_max": "--policy_objective clip sampler_weights:cap={}",
    "vllm_importance_sampling_clip_min": "--policy_objective clip sampler_weights:floor={}",
    "vllm_importance_sampling_correction": "--policy_objective clip sampler_weights",
    "vllm_importance_sampling_mode": "--policy_objective clip sampler_weights:correction={}",
}
# Values of flags that are gone, at which they did nothing
OFF: dict[str, float | str] = {
    "epsilon_high": -1.0,
    "epsilon_low": -1.0,
    "importance_sampling_level": "token",
    "label_smoothing": 0.0,
    "objective_args": "",
    "off_policy_mask_threshold": 0.0,
    "ratio_level": "token",
    "sampler_correction": "none",
    "sampler_drift_coef": 0.0,
    "scale_rewards": "",
    "vllm_importance_sampling_correction": "false",
}
PAGES = "see --help; docs/from-trl.md has TRL's flags, and CHANGELOG.md those that are gone"


def counterparts(name: str, flags: Sequence[str]) -> list[str]:
    """Those of a script's flags that do what a flag of `OTHER_NAMES` does; none if any lacks."""
    lists = (ours.split() for ours, names in OTHER_NAMES.items() if name in names.split())
    return next((ours for ours in lists if {*ours} <= {*flags}), [])


def is_off(name: str, value: str) -> bool:
    """Whether a flag that is gone did nothing at a value."""
    off = OFF.get(name)
    try:
        return float(value) == off if isinstance(off, float) else value.lower() == off
    except ValueError:
        return False


def instead(
    name: str, value: str, flags: Sequence[str], named: Mapping[str, Sequence[Any]] = NOTHING
) -> str:
    """What to write for a setting of objectives that was given as a flag; empty if it is none.

    The setting goes behind a function that has it, where the command or its recipe names one: see
    `find.Function`, by flag.

    >>> instead("epsilon_high", "0.28", ["policy_objective"])
    '--policy_objective clip:epsilon_high=0.28'
    """
    if name == "objective_args":
        flag = next((x for x in ("policy_objective", "loss_type") if x in flags), "")
        return f"--{flag} NAME:{value}" if flag else ""
    text = SETTINGS.get(f"{name}={value.lower()}", SETTINGS.get(name, ""))
    flag, _, functions = text[2:].partition(" ")
    if not text or flag not in flags:
        return ""
    value, there = value or "VALUE", named.get(flag, [])
    if name == "scale_rewards" and value != "mean" and there and "scale" in there[0].settings:
        return f"--{flag} {there[0].name}:scale={value}"
    *before, last = functions.split()
    settings = re.findall(r"(\w+)=\{\}", last)
    written = [f"{setting}={value}" for setting in settings]
    has_them = [{*settings} <= each.settings.keys() for each in there]
    if settings and any(has_them):
        place = has_them.index(True)
        words = [each.text for each in there]
        words[place] += ("," if there[place].text != there[place].name else ":") + ",".join(written)
        return f"--{flag} {' '.join(words)}"
    if before and there:
        before = [each.text for each in there if each.name != last.partition(":")[0]]
    return f"--{flag} {' '.join([*before, last.replace('{}', value)])}"


def answer(
    words: Sequence[Any],
    flags: Sequence[str],
    values: Sequence[Any] = (),
    named: Mapping[str, Sequence[Any]] = NOTHING,
) -> str:
    """Unknown flags or keys as the end of the sentence that refuses them, the first answered.

    The words are as they were given, with dashes and value or without; the `values` are the
    first's. For `named` see `instead`.
    """
    word, others = words[0], ", ".join(str(word).partition("=")[0] for word in words[1:])
    name, equals, value = str(word).lstrip("-").partition("=")
    name = name.replace("-", "_")
    if not equals:
        value = ",".join(map(str, values if name == "objective_args" else values[:1]))
    if (equals or values or name == "objective_args") and is_off(name, value):
        advice = ": leave it out, it did nothing"
    elif written := instead(name, value, flags, named):
        advice = f": write {written}; settings stand behind an objective's name"
    elif ours := counterparts(name, flags):
        here = " and ".join(f"--{flag}" for flag in ours)
        advice = f": {name} is {here} here, see docs/from-trl.md and CHANGELOG.md"
    elif name.endswith((".yaml", ".yml")):
        advice = f": a recipe is given as --config {word}"
    else:
        guess = hint(name, flags, "")
        advice = f" ({guess} {PAGES})" if guess else f" ({PAGES})"
    return f"{word!r}{advice}" + (f"; also unknown: {others}" if others else "")
