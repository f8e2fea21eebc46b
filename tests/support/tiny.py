"""Tiny random models of three families, and batches of them, for the tests that need a model.

Weights are drawn wide and biases and norms are moved off their initial values, so that the models'
distributions are far from uniform and a wrong position, mask or shift shows.
"""

import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from common import distributed
from common.batch import PaddedBatch
from common.checkpoint.checkpointer import Checkpointer
from common.config.stages import SFTConfig
from common.model import fsdp, shared_prefix
from common.padding import left_pad, position_ids, right_pad
from common.record.metrics import Accumulator
from common.rewards.score import RewardFunctions
from common.text import synthetic
from common.text.example import Example, Vocabulary

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (  # each ends in the tokenizer's own eos
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FAMILIES = ("gpt2", "llama", "qwen2")  # learned positions; rotary; rotary with attention biases
SCALED = (  # families that change their logits, with what they do
    ("granite", {"logits_scaling": 3.0}),
    ("cohere", {"logit_scale": 0.25}),
    ("nanochat", {"final_logit_softcapping": 2.0}),
)


def model_config(family: str, *, vocab_size: int = 61, width: int = 32, **fields: Any) -> Any:
    """Two layers; no dropout."""
    if family == "gpt2":
        shape = {"n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 96}
        shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    shape |= {"vocab_size": vocab_size, "initializer_range": 0.3, **special}
    return AutoConfig.for_model(family, **(shape | fields))


def random_weights(lm: Any, seed: int) -> Any:
    """Move every parameter; a tied embedding is made small, or the model repeats its last token."""
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in lm.modules() if "Norm" in type(module).__name__]
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        if lm.config.tie_word_embeddings:
            lm.get_input_embeddings().weight *= 0.25
            norms[-1].weight *= 4
    return lm.eval()


def causal_lm(family: str, *, seed: int = 0, is_plain: bool = False, **fields: Any) -> Any:
    """A Hugging Face causal language model in float32, on this process's device.

    A plain one keeps the attention that transformers gave it, without `common.model.shared_prefix`.
    """
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(model_config(family, **fields))
    if not is_plain:
        shared_prefix.use_shared_prefix(lm, fsdp.blocks(lm)[-1])
    return random_weights(lm, seed).to(distributed.device())


def classifier(
    family: str, *, seed: int = 0, is_plain: bool = False, pad_id: int = -1, **fields: Any
) -> Any:
    """A Hugging Face sequence classifier with one label whose pad token is the last one."""
    torch.manual_seed(seed)
    config = model_config(family, **fields)
    config.num_labels, config.pad_token_id = 1, pad_id % config.vocab_size
    lm = AutoModelForSequenceClassification.from_config(config)
    if not is_plain:
        shared_prefix.use_shared_prefix(lm, fsdp.blocks(lm)[-1])
    return random_weights(lm, seed).to(distributed.device())


def like_pretrained(lm: Any) -> Any:
    """The model with a pretrained one's magnitudes: random tokens have about -12 nats each.

    There bfloat16's rounding moves a token's log-probability by some hundredths of a nat.
    """
    ids = torch.arange(lm.config.vocab_size - 1)[:64, None].to(distributed.device())
    with torch.no_grad():
        logits = (
            lm.base_model(input_ids=ids).last_hidden_state @ lm.get_output_embeddings().weight.T
        )
        norm = [module for module in lm.modules() if "Norm" in type(module).__name__][-1]
        for parameter in norm.parameters():
            parameter *= 3.2 / logits.std()
    return lm


def cap_logits(lm: Any) -> None:
    """Have the model cap its logits at 30, as Gemma 2 does."""
    plain = lm.forward

    def capped(**inputs: Any) -> Any:
        output = plain(**inputs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    lm.forward = capped


def train_config(**fields: Any) -> SFTConfig:
    """A config that names no folder that would be read or written."""
    needed = {"output_dir": "unused", "model_name_or_path": "unused", "micro_batch_size": 4}
    return SFTConfig(**(needed | fields))


def write_run_config(run_dir: Path, **fields: Any) -> None:
    """Write the config.yaml of a training run with these values."""
    values = dataclasses.asdict(train_config()) | fields
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(values))


def checkpointer(
    output_dir: Path, model: Any, optimizer: Any, reference: Any = None, **fields: Any
) -> Checkpointer:
    """Of a run without metrics."""
    config = train_config(output_dir=str(output_dir), **fields)
    return Checkpointer(config, model, optimizer, Accumulator(distributed.device()), reference)


@functools.cache
def tokenizer() -> Any:
    """The embedded task's tokenizer with 300 tokens: id 0 ends, id 1 pads."""
    return synthetic.train_tokenizer(300)


def save(lm: Any, folder: Path, of: Any = None) -> str:
    """Write a model and a tokenizer (default: `tokenizer`) into a folder; the folder's path."""
    lm.save_pretrained(folder)
    (of or tokenizer()).save_pretrained(folder)
    return str(folder)


def save_stopping_model(folder: Path, tokenizer_folder: Path, seed: int) -> None:
    """Random weights that stop with a chance of about 5 % at each token."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(seed)
    eos = tokenizer.eos_token_id
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 96}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **shape)
    lm = GPT2LMHeadModel(config)
    with torch.no_grad():
        lm.transformer.wte.weight *= 5
        lm.transformer.wte.weight[eos] = 0.25
        lm.transformer.ln_f.bias += 0.5
    save(lm, folder, tokenizer)


def chatml_tokenizer(eos_token: str = "<|im_end|>", vocab_size: int = 1024) -> Any:
    """The embedded task's tokenizer with a ChatML template, whose turns end in a special token."""
    chatml = synthetic.train_tokenizer(vocab_size)
    turns = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    chatml.add_special_tokens(turns | {"eos_token": eos_token})
    chatml.chat_template = CHATML
    return chatml


def with_template(of: Any, template: Any) -> Any:
    copied = copy.deepcopy(of)
    copied.chat_template = template
    return copied


def vocabulary(
    stop_ids: Sequence[int] = (0,), of: Any = None, *, pad_id: int | None = None
) -> Vocabulary:
    """The vocabulary of a tokenizer (default: `tokenizer`), with its pad id unless one is given."""
    of = of or tokenizer()
    return Vocabulary(of, of.pad_token_id if pad_id is None else pad_id, stop_ids)


def plain_logits(lm: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Logits (C, V) that predict the completion: transformers alone, one sequence, no padding."""
    ids = torch.tensor([prompt + completion], device=distributed.device())
    return lm(input_ids=ids).logits[0, len(prompt) - 1 : -1]


def plain_logps(
    lm: Any, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> Tensor:
    """Log-probabilities (C,) of a completion's tokens from `plain_logits`, in float64."""
    logps = (plain_logits(lm, prompt, completion).double() / temperature).log_softmax(-1)
    return logps[torch.arange(len(completion)), torch.tensor(completion)].cpu()


def rounding(lm: Any, temperature: float = 1.0) -> float:
    """Most that float32 rounding sets two computations of a log-probability or reward apart.

    A logit is a sum of D products, rounded by at most D * eps / 2 of their absolute sum (Higham
    2002, section 3.1). A log-probability is the difference of two, and two computations are
    compared. Sums reach a tenth of their bound, which leaves room for the blocks' own rounding.
    """
    head = lm.get_output_embeddings() or lm.score
    ids = torch.arange(lm.config.vocab_size, device=head.weight.device)[:, None]
    with torch.no_grad():
        states = lm.base_model(input_ids=ids).last_hidden_state.flatten(0, 1).abs()  # (V, D)
        terms = (states @ head.weight.abs().T).max()
    return 2 * states.shape[1] * torch.finfo(torch.float32).eps * float(terms) / temperature


def gradient_rounding(lm: Any) -> float:
    """The same of a parameter's gradient, relative to its norm.

    A block has 6 sums in a row of about D terms, forward and backward; each rounds by D * eps / 2
    of its norm at most, in both computations.
    """
    depth, width = lm.config.num_hidden_layers, lm.config.hidden_size
    return 12 * depth * width * torch.finfo(torch.float32).eps


def enumerated_kl(
    lm: Any, reference: Any, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> Tensor:
    """KL(pi || ref) (C,) of the next-token distributions, summed over the policy's ids."""
    num_ids = lm.config.vocab_size
    logps, ref_logps = (
        (plain_logits(model, prompt, completion)[:, :num_ids] / temperature).log_softmax(-1)
        for model in (lm, reference)
    )
    return (logps.exp() * (logps - ref_logps)).sum(-1)


def random_ids(length: int, *, seed: int, vocab_size: int = 61) -> list[int]:
    """Any ids, the end-of-text id 0 among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def ragged_examples(
    lengths: list[tuple[int, ...]], *, vocab_size: int = 61, stop_id: int = 0
) -> list[Example]:
    """Random examples: per row the prompt's length, then the lengths of its completions."""
    examples = []
    for row, (prompt_length, *completion_lengths) in enumerate(lengths):
        prompt = random_ids(prompt_length, seed=1000 + row, vocab_size=vocab_size)
        completions = [
            [*random_ids(n - 1, seed=100 * row + k, vocab_size=vocab_size), stop_id]
            for k, n in enumerate(completion_lengths)
        ]
        examples.append(Example(row, f"prompt {row}", prompt, completions, {}))
    return examples


def batch_of(
    prompts: list[list[int]],
    completions: list[list[int]],
    *,
    side: str,
    extra: int = 0,
    pad_id: int = 7,
) -> PaddedBatch:
    """Whole sequences padded on one side, `extra` columns more than needed.

    Every column but the first is a completion column; the mask says which hold completion tokens,
    in order, so that prompts of different lengths fit in a batch without left padding.
    """
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    widest = max(map(len, rows)) + extra
    pad = left_pad if side == "left" else right_pad
    ids, mask = pad([*rows, [pad_id] * widest], pad_id)  # the last row only sets the width
    ids, mask = ids[:-1], mask[:-1]  # (B, T)
    marks = [[0] * len(p) + [1] * len(c) for p, c in zip(prompts, completions, strict=True)]
    is_completion = pad([*marks, [0] * widest], 0)[0][:-1].bool()  # (B, T)
    real = torch.ones(len(rows), dtype=torch.bool)
    shared = (is_completion[:, 1:], real, torch.arange(len(rows)), list(range(len(rows))))
    return PaddedBatch(*shared, ids, mask, position_ids(mask)).to(distributed.device())


class OnGpu(Tensor):
    """A tensor of the host that says it is on a GPU, and as there cannot index one of the host."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__ and not isinstance(args[0], cls):
            raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if func is Tensor.cpu else result


def on_gpu(tensor: Tensor) -> Tensor:
    """As if it had been copied there."""
    return tensor.as_subclass(OnGpu)


def reward_functions(
    names: Sequence[str], weights: Sequence[float] = (), of: Any = None, **fields: Any
) -> RewardFunctions:
    """The functions of these names, for a policy with a tokenizer (default: `tokenizer`)."""
    return RewardFunctions.find(names, weights, vocabulary(of=of), train_config(**fields))


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def check_sentence(message: object, *phrases: str) -> None:
    """Check that a message is one sentence of moderate length that holds these parts."""
    text = str(message)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 400
    assert text.count(". ") == 0, "more than one sentence"
    for phrase in phrases:
        assert phrase in text


def per_row(values: Tensor, mask: Tensor) -> list[Tensor]:
    """The values (B, C) at the marked places, row by row, on the host."""
    return [row[kept].cpu() for row, kept in zip(values, mask, strict=True)]


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of one inside, which ends with the block unless it was there before."""
    was_started = torch.distributed.is_initialized()
    distributed.start()
    yield
    if not was_started:
        torch.distributed.destroy_process_group()


@contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Stages run inside: there, in this process, in a process group of one."""
    before = Path.cwd()
    os.chdir(folder)
    with process_group():
        yield
    os.chdir(before)


def output_of(program: str, hash_seed: str) -> str:
    """Output of a Python program in a separate process, with another hash of texts."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def shard_with_fsdp(*args: Any, shard: Any = fsdp.shard, **kwargs: Any) -> Any:
    """`fsdp.shard` as of two processes: in one it would leave the module plain."""
    with mock.patch.object(distributed, "world_size", return_value=2):
        return shard(*args, **kwargs)
