"""What an unknown flag is answered: ours for one of TRL's, or one that is spelt almost so."""

from collections.abc import Sequence
from typing import Any

from common.errors import hint

# TRL's and transformers' flags by ours; docs/from-trl.md has all of them, with what differs.
TRL = {
    ("batch_size",): ("per_device_train_batch_size", "gradient_accumulation_steps"),
    ("micro_batch_tokens",): (
        *("per_device_eval_batch_size", "precompute_ref_batch_size", "auto_find_batch_size"),
    ),
    ("max_prompt_length", "max_completion_length"): (
        *("max_length", "max_seq_length", "vllm_max_model_length"),
    ),
    ("max_completion_length",): ("max_target_length",),
    ("prompt_truncation",): ("truncation_mode",),
    ("warmup_steps",): ("warmup_ratio",),
    ("min_lr",): ("lr_scheduler_kwargs",),
    ("seed",): ("data_seed",),
    ("bf16",): ("fp16", "bf16_full_eval", "fp16_full_eval", "dtype", "torch_dtype"),
    ("gradient_checkpointing",): ("activation_checkpointing", "activation_offloading"),
    ("compile",): ("torch_compile",),
    ("layout",): ("attn_implementation",),
    ("num_replicas",): ("parallelism_config",),
    ("reshard_after_forward",): ("fsdp",),
    ("cpu_offload", "prefetch_blocks", "shard_gradients"): ("fsdp_config",),
    ("dataset_test_split",): ("do_eval", "test_split_size"),
    ("eval_steps",): ("eval_strategy", "evaluation_strategy"),
    ("logging_steps",): ("logging_strategy", "logging_first_step"),
    ("sample_steps",): ("log_completions", "generate_during_eval"),
    ("num_sample_prompts",): ("num_completions_to_print", "log_unique_prompts"),
    ("save_steps",): ("save_strategy",),
    ("keep_last",): ("save_total_limit",),
    ("resume_from_checkpoint",): ("overwrite_output_dir",),
    ("output_dir",): ("logging_dir",),
    ("tokenizer_name_or_path",): ("chat_template_path",),
    ("stop_token",): ("eos_token",),
    ("lora_r",): ("use_peft",),
    ("lora_alpha",): ("use_rslora",),
    ("sft_weight",): ("rpo_alpha",),
    ("reward_funcs",): ("reward_model_name_or_path",),
    ("aggregation", "policy_objective"): ("loss_type",),
    ("epsilon_low", "epsilon_high"): ("epsilon",),
    ("ratio_level",): ("importance_sampling_level",),
    ("num_minibatches",): ("steps_per_generation",),
    ("kl_correction",): ("use_bias_correction_kl",),
    ("ref_update_steps",): ("sync_ref_model", "ref_model_sync_steps"),
    ("ref_mixup_alpha",): ("ref_model_mixup_alpha",),
    ("rollout_server",): (
        *("use_vllm", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    ),
    ("ddp_timeout",): ("vllm_server_timeout",),
    ("sampler_correction",): (
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    ),
    ("sampler_correction_cap",): (
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    ),
    ("sampler_correction_floor",): ("vllm_importance_sampling_clip_min",),
}


def answer(words: Sequence[Any], flags: Sequence[str]) -> str:
    """Unknown flags or keys as the end of the sentence that refuses them, the first answered.

    Args:
        words: As they were given, with dashes and value or without.
        flags: Those of the script.
    """
    word, others = words[0], ", ".join(str(word).partition("=")[0] for word in words[1:])
    name = str(word).lstrip("-").partition("=")[0].replace("-", "_")
    ours = next(
        (ours for ours, theirs in TRL.items() if name in theirs and {*ours} <= {*flags}), ()
    )
    if ours:
        here = " and ".join(f"--{flag}" for flag in ours)
        advice = f": TRL's {name} is {here} here, see docs/from-trl.md"
    elif name.endswith((".yaml", ".yml")):
        advice = f": a recipe is given as --config {word}"
    else:
        advice = f" ({hint(name, flags)})"
    return f"{word!r}{advice}" + (f"; also unknown: {others}" if others else "")
