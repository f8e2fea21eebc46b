"""Claim: on a GPU a pass is as large as its memory allows, unless a flag says otherwise.

About `common.model.sizes`.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny

from common import distributed
from common.config.parser import parse_given
from common.config.stages import SFTConfig
from common.errors import UserError
from common.model import sizes

pytestmark = pytest.mark.usefixtures("process_group")
GPT2 = {"model_type": "gpt2", "n_positions": 1024}
SHAPES = {
    "small": GPT2,
    "large": GPT2 | {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def chosen(folder: Path, shape: str, gigabytes: int, *more: str) -> SFTConfig:
    """The config of SFT with a model on a GPU of so much memory."""
    path = folder / "model.json"
    path.write_text(json.dumps(SHAPES[shape]))
    flags = ["--model_name_or_path", str(path), "--output_dir", str(folder / "run"), *more]
    config, given = parse_given(SFTConfig, flags)
    with mock.patch.object(distributed, "device_memory", return_value=int(gigabytes * 1e9)):
        return sizes.for_device(config, given)


def test_a_larger_gpu_or_a_smaller_model_has_larger_passes(tmp_path: Path, capsys: Any) -> None:
    bf16 = ["--bf16", "true"]
    tokens = [
        chosen(tmp_path, shape, memory, *flags).micro_batch_tokens
        for shape, memory, flags in (
            ("8B", 80, bf16),  # its states alone do not fit
            ("large", 24, bf16),
            ("large", 80, []),
            ("large", 80, bf16),
            ("large", 80, [*bf16, "--gradient_checkpointing", "true"]),
            ("small", 80, bf16),
        )
    ]
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (sizes.FEWEST, sizes.MOST)
    assert all(a < b for a, b in zip(tokens[1:4], tokens[2:5], strict=True))
    assert all(number % 1024 == 0 for number in tokens)
    assert (
        "by the GPU's 80 GB: micro_batch_tokens 65536, generation_batch" in capsys.readouterr().out
    )


def test_a_micro_batch_fits_by_the_plan(tmp_path: Path) -> None:
    """States and what is kept of the chosen tokens, by hand: 36 blocks of 17 x 1280 numbers."""
    tokens = chosen(tmp_path, "large", 80, "--bf16", "true").micro_batch_tokens
    assert 0.4 * 80e9 < 24 * 774e6 + tokens * 36 * 17 * 1280 * 2 < 0.75 * 80e9


def test_completions_decoded_at_once_have_room_for_keys_and_values(tmp_path: Path) -> None:
    """Of an 8B model with grouped heads, and a prompt for each completion."""
    limits = ("--max_prompt_length", "1024", "--max_completion_length", "512")
    sized = chosen(tmp_path, "8B", 80, "--bf16", "true", *limits)
    room = 0.1 * 80e9 / (2 * 32 * 8 * 128 * 2)  # tokens
    assert sized.generation_batch_size == int(room / 1536)


def test_what_is_given_stays_and_so_does_everything_on_a_cpu(tmp_path: Path) -> None:
    sized = chosen(tmp_path, "small", 80, "--micro_batch_tokens", "4096", "--bf16", "true")
    assert sized.micro_batch_tokens == 4096
    assert sized.generation_batch_size == sizes.COMPLETIONS
    config, given = parse_given(SFTConfig, ["--model_name_or_path=x.json", "--output_dir=y"])
    assert given == {"model_name_or_path", "output_dir"}
    assert sizes.for_device(config, given) == config


def test_a_model_of_another_shape_keeps_the_defaults(tmp_path: Path) -> None:
    SHAPES["no heads"] = {"model_type": "mamba"}
    assert chosen(tmp_path, "no heads", 80).micro_batch_tokens == 4096
    SHAPES["unknown"] = {"model_type": "nothing"}
    with pytest.raises(UserError) as caught:
        chosen(tmp_path, "unknown", 80)
    tiny.check_sentence(caught.value, "model.json")
