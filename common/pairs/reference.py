"""What DPO's frozen reference says of pairs, kept on disk so that a second run need not compute it.

A file of `ref_cache_dir` is named after everything its numbers depend on: the reference's weights
and configuration, the rows as token ids, the tokenizer, the limits that truncate, the dtype,
`ld_alpha`, the versions of the libraries and this package's code. The layout, the micro-batches and
the number of ranks are not among them, since they change no score; neither is which of the rows a
run trains on: what a file lacks is computed and added. Its body (`text/checked_file.py`) is two
float64 numbers for each row, NaN where a row was not scored yet. It may be deleted at any time.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, self_checks
from common.data import Example
from common.evaluation import score
from common.losses import sequence_logps
from common.model import fsdp, load
from common.padding import AnyBatch
from common.scoring import Policy
from common.text import checked_file

if TYPE_CHECKING:
    from common.model.lora import AdapterReference
    from common.pairs.config import DPOConfig

PACKAGES = ("torch", "transformers")
# Of a model's configuration: where it was read from and who wrote it, which change no score.
ORIGIN = ("_name_or_path", "transformers_version")


@dataclass
class ReferenceScores:
    """What the frozen reference says of pairs: nothing where a loss needs none.

    Attributes:
        module: asked in training, None where all of its pairs were scored before.
        train: (rows, 2) float32 on the device, chosen first, where they were; tails count
            `ld_alpha`.
        held_out: (rows, 2).
        shown: of each token of the pairs in tables.
        first: (1, 2) of the first training pair, where every token counts 1.
    """

    module: "Policy | AdapterReference | None" = None
    train: Tensor | None = None
    held_out: Tensor | None = None
    shown: Any = None
    first: Tensor | None = None

    def of_batch(self, batch: AnyBatch, shared_lengths: Tensor, ld_alpha: float) -> Tensor:
        """Log-probabilities (N, 2) of a micro-batch's pairs; 0 without a reference."""
        if self.train is not None:
            return self.train[batch.places[::2] // 2]
        if self.module is None:
            return torch.zeros(len(batch.places) // 2, 2, device=shared_lengths.device)
        with torch.no_grad():
            return desensitised(self.module, batch, shared_lengths, ld_alpha).view(-1, 2)


def load_reference(
    config: "DPOConfig",
    paths: Sequence[str],
    configs: Sequence[Any],
    mesh: DeviceMesh,
    tokenizer: Any,
    train_set: Sequence[Example],
    eval_set: Sequence[Example],
    shown: list[Example],
    rows: Sequence[int],
) -> tuple[ReferenceScores, Policy | None]:
    """What the frozen reference says of pairs, with `precompute_ref_log_probs` of all. Collective.

    Paths and model configurations are those of policy and reference; training takes the `rows` of
    the train_set, and `shown` are in tables.

    Returns:
        The scores; and the policy, if with LoRA on the same model its adapters off are the
        reference.
    """
    from common.model.lora import AdapterReference
    from common.sampling import token_records

    is_policy = config.lora_r > 0 and paths[0] == paths[1]
    lm = load.load_policy(paths[1], configs[1], config, trains=is_policy)
    weights = weights_digest(lm) if config.ref_cache_dir else ""
    whole = Policy(lm) if is_policy else Policy(lm).requires_grad_(False)
    policy = fsdp.shard(whole, config, mesh)
    reference = AdapterReference(policy) if is_policy else policy
    self_checks.only_tokens_matter(reference, config)

    pad_id = tokenizer.pad_token_id
    rest = (reference, weights, tokenizer, config)
    found = ReferenceScores(reference)
    found.first = score.score_examples(reference, train_set[:1], config, pad_id, "reference")
    found.shown = token_records.token_logps(reference, shown, config, pad_id)
    if eval_set:
        found.held_out = reference_logps(*rest, eval_set, range(len(eval_set)))
    if config.precompute_ref_log_probs:
        logps = reference_logps(*rest, train_set, rows, config.ld_alpha)
        # A filler has the place of row 0, which may be none of the rows.
        found.train = logps.nan_to_num().float().to(distributed.device())
        found.module = None
    return found, policy if is_policy else None


def reference_logps(
    reference: "Policy | AdapterReference",
    weights: str,
    tokenizer: Any,
    config: "DPOConfig",
    examples: Sequence[Example],
    rows: Sequence[int],
    ld_alpha: float = 1.0,
) -> Tensor:
    """Log-probabilities under the reference of some rows of N pairs. Collective.

    Returns:
        (N, 2) float64 on the host, NaN in other rows; a token beyond the shorter completion's
        length counts `ld_alpha`.

    Raises:
        RuntimeError: one is not finite.
    """
    shared = shorter_lengths(examples)

    def score_rows(missing: Sequence[int]) -> Tensor:
        rest = (config, tokenizer.pad_token_id, "reference", missing)
        own = partial(desensitised, shared_lengths=shared, ld_alpha=ld_alpha)
        by_row = ld_alpha != 1  # tails begin where the other completion of the row ends
        return score.score_examples(reference, examples, *rest, own, by_row=by_row)

    file = None
    if config.ref_cache_dir:
        file = cache_file(weights, examples, tokenizer, config, ld_alpha)
    logps = complete(file, len(examples), rows, score_rows)
    is_finite = logps.isfinite().all(1).tolist()
    broken = [row for row in rows if not is_finite[row]]
    if broken:
        raise RuntimeError(
            f"the reference gives pair {broken[0]} (counted from 0) the log-probabilities "
            f"{logps[broken[0]].tolist()}; they must be finite."
        )
    return logps


def shorter_lengths(examples: Sequence[Example]) -> Tensor:
    """Tokens of the shorter completion of each pair, (rows,) on the device."""
    shorter: Tensor = data.lengths(examples)[:, 1:].amin(1)
    return shorter.to(distributed.device())


def desensitised(
    model: nn.Module, batch: AnyBatch, shared_lengths: Tensor, ld_alpha: float
) -> Tensor:
    """Log-probabilities (B,) of completions whose tails count `ld_alpha`."""
    shared = shared_lengths[batch.places // 2]  # (B,)
    token_logps = model(batch).token_logps  # (B, C)
    return sequence_logps(token_logps, batch.completion_mask, shared, ld_alpha=ld_alpha)


# ---- on disk -------------------------------------------------------------------------------------


def weights_digest(lm: Any) -> str:
    """SHA-256 of a Hugging Face model's configuration, weights and buffers. Collective.

    Of a model with adapters it is that of the model before they were trained. Call it before the
    model is sharded, while rank 0 has all of it: rank 0's digest is returned on every rank.
    """
    from common.model import lora

    digest = hashlib.sha256()
    if distributed.is_rank0():
        fields = {k: v for k, v in lm.config.to_dict().items() if k not in ORIGIN}
        fields["adapter_scales"] = lora.reference_scales(lm)
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
        for name, tensor in sorted(lora.reference_state(lm).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    result: str = distributed.from_rank0(digest.hexdigest())
    return result


def cache_file(
    weights: str,
    examples: Sequence[Example],
    tokenizer: Any,
    config: "DPOConfig",
    ld_alpha: float = 1.0,
) -> Path:
    """Where the log-probabilities of all pairs of a split, in their order, are or belong."""
    description = {
        "weights": weights,
        "tokenizer": [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())],
        "lengths": [config.max_prompt_length, config.max_completion_length],
        "truncation": config.prompt_truncation,
        "dtype": "bfloat16" if config.bf16 else "float32",
        "ld_alpha": ld_alpha,
        "versions": {name: version(name) for name in PACKAGES},
        "code": checked_file.code_digest(),
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for example in examples:
        digest.update(json.dumps([example.prompt_ids, *example.completions]).encode())
    return Path(config.ref_cache_dir) / f"{digest.hexdigest()}.logps"


def complete(
    file: Path | None,
    num_rows: int,
    rows: Sequence[int],
    score_rows: Callable[[Sequence[int]], Tensor],
) -> Tensor:
    """Log-probabilities of some rows of N: from the file, and computed where it lacks them.

    Collective, as `score_rows`: it is given the rows that are missing.

    Returns:
        (N, 2) float64 on the host, the same on every rank; NaN may stand in rows not asked for.
    """
    known = torch.full((num_rows, 2), torch.nan, dtype=torch.float64)
    if file is not None:
        # Rank 0 decides for all: on machines without a common disk the others would find nothing,
        # and wait for ranks that do not compute.
        stored = distributed.from_rank0(read(file) if distributed.is_rank0() else None)
        known = known if stored is None else stored
    is_known = ~known.isnan().any(1)  # (N,)
    missing = [row for row in rows if not is_known[row]]
    if not missing:
        distributed.print_rank0(f"reference log-probabilities of {len(rows)} pairs from {file}")
        return known
    known = torch.where(is_known[:, None], known, score_rows(missing))
    if file is not None and distributed.is_rank0():
        write(file, known)
    return known


def read(file: Path) -> Tensor | None:
    """The numbers (N, 2) as `write` was given them, None where there are none.

    A damaged file is reported.
    """
    if not file.exists():
        return None
    body = checked_file.read(file)
    if body is None:
        print(f"warning: {file} is damaged; its log-probabilities are computed again.", flush=True)
        return None
    return torch.from_numpy(np.array(np.frombuffer(body)).reshape(-1, 2))


def write(file: Path, logps: Tensor) -> None:
    """Keep the numbers (N, 2). A disk that refuses is warned about."""
    body = [logps.contiguous().numpy()]
    checked_file.keep(file, body, "reference log-probabilities", "ref_cache_dir")
