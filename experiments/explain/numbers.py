"""From the trace of a step to the numbers of its page, ready for JSON, in full precision.

What a function of the script returned is taken as it is. Only what no function returns is computed
here, from what was traced: a mean and a standard deviation, sigmoids, sums and differences.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common import data
from common.losses import kl_estimate
from common.padding import MAKERS, AnyBatch, PaddedBatch
from common.text.example import Vocabulary
from experiments.explain.trace import Trace, scores_of

Record = dict[str, Any]


def explain(trace: Trace, config: Any, stage: str, vocabulary: Vocabulary) -> Record:
    """The layouts, and the numbers by level: prompts, completions with tokens, pairs, step."""
    packed = [groups_of(trace, batch) for batch in trace.batches]
    result: Record = {"prompts": [], "pairs": [], "step": step_numbers(trace, config)}
    result["completions"] = trained_completions(trace, packed)
    if stage == "sft":
        add_sft(trace, result)
    elif stage == "reward":
        add_reward(trace, result)
    elif stage == "dpo":
        add_dpo(trace, config, result)
    else:
        add_grpo(trace, config, result)
    result["step"]["loss"] = float(total_loss(trace)) / result["step"]["denominator"]
    result["layouts"] = {
        name: [
            layout_of(data.collate(groups, name, vocabulary.pad_id), vocabulary)
            for groups in packed
        ]
        for name in MAKERS
    }
    ids = {i for views in result["layouts"].values() for view in views for i in view["ids"]}
    ids |= {i for one in result["completions"] for i in one["ids"]}
    result["texts"] = {str(i): vocabulary.tokenizer.decode([i]) for i in sorted(ids)}
    return result


# ---- the batch -----------------------------------------------------------------------------------


def groups_of(trace: Trace, batch: AnyBatch) -> Sequence[data.PromptGroup]:
    """The prompts with their completions that a micro-batch was made of."""
    same = (c for c in trace.of("collate") if torch.equal(c.result.input_ids, batch.input_ids))
    groups: Sequence[data.PromptGroup] = next(same).arguments["groups"]
    return groups


def layout_of(batch: AnyBatch, vocabulary: Vocabulary) -> Record:
    """Ids and positions of a batch, flattened; a letter for the kind of each, - for padding."""
    ids, lengths = batch.input_ids, batch.completion_mask.sum(1).tolist()
    kinds = torch.full(ids.shape, ord("p"))
    if isinstance(batch, PaddedBatch):
        kinds[~batch.attention_mask] = ord("-")
        last = batch.attention_mask.long().cumsum(1).argmax(1)
        ends = [(row, column) for row, column in enumerate(last.tolist())]
    else:
        ends = [(0, column) for column in batch.last.tolist()]
    for (row, end), length in zip(ends, lengths, strict=True):
        kinds[row, end - length + 1 : end + 1] = ord("c")
        if int(ids[row, end]) in vocabulary.stop_ids:
            kinds[row, end] = ord("s")
    letters = "".join(map(chr, kinds.flatten().tolist()))
    positions = batch.position_ids.flatten().tolist()
    shape = [*ids.shape]
    return {"shape": shape, "ids": ids.flatten().tolist(), "positions": positions, "kinds": letters}


# ---- numbers of every stage ----------------------------------------------------------------------


def step_numbers(trace: Trace, config: Any) -> Record:
    """What the update did to the gradient."""
    update = trace.of("clip_and_step")[-1].result
    norm, most = float(update["grad_norm"]), config.max_grad_norm
    clipped = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
    return {"grad_norm": norm, "clip_factor": clipped, "learning_rate": update["learning_rate"]}


def total_loss(trace: Trace) -> Tensor:
    """The sum of all losses of the step, as it was checked before the update."""
    total: Tensor = trace.of("clip_and_step")[-1].arguments["loss"]
    return total


def trained_completions(trace: Trace, packed: Sequence[Sequence[data.PromptGroup]]) -> list[Record]:
    """The completions that were trained on, in the order of the batches."""
    records = []
    for call, after, groups in zip(trace.forwards, trace.after, packed, strict=True):
        batch, scores = call.arguments["batch"], scores_of(call).detach()
        owners = [group for group in groups for _ in group.completions]
        for row, (owner, slot) in enumerate(zip(owners, batch.slots.tolist(), strict=True)):
            mask = batch.completion_mask[row]
            record: Record = {"slot": slot, "row": owner.row, "prompt_ids": owner.prompt_ids}
            record |= {"ids": batch.completion_ids[row, mask].tolist(), "tokens": {}}
            if scores.dim() == 2:
                record |= moved(record, scores[row, mask], after[row, mask])
            else:
                record |= {"reward": float(scores[row]), "reward_after": float(after[row])}
            records.append(record)
    return records


def moved(record: Record, logps: Tensor, after: Tensor) -> Record:
    """How far tokens, and with them the completion, moved in the step."""
    record["tokens"] |= {"logp": logps.tolist(), "logp_after": after.tolist()}
    record["tokens"]["change"] = (after.double() - logps.double()).tolist()
    before, later = float(logps.double().sum()), float(after.double().sum())
    factor = math.exp(later - before)
    return {"completion_logp": before, "completion_logp_after": later, "factor": factor}


def by_row(values: Sequence[Tensor], batches: Sequence[AnyBatch]) -> list[list[Any]]:
    """Values (B, C) of each micro-batch as lists of the tokens of each completion."""
    return [
        row[mask].tolist()
        for each, batch in zip(values, batches, strict=True)
        for row, mask in zip(each.detach(), batch.completion_mask, strict=True)
    ]


# ---- by stage ------------------------------------------------------------------------------------


def add_sft(trace: Trace, result: Record) -> None:
    """Losses of tokens."""
    for record in result["completions"]:
        record["label"] = f"row {record['row'] + 1}"
        record["tokens"]["token_loss"] = [-logp for logp in record["tokens"]["logp"]]
        record["moved_as_wanted"] = record["factor"] > 1
    result["step"]["denominator"] = float(trace.of("count_all", "main")[-1].result)


def label_pairs(trace: Trace, result: Record) -> None:
    """Say which completion is the chosen one."""
    for record in result["completions"]:
        kind = ("chosen", "rejected")[record["slot"] % 2]
        record["label"] = f"row {record['row'] + 1}, {kind}"
    result["step"]["denominator"] = float(trace.of("count_all", "main")[-1].result)


def add_reward(trace: Trace, result: Record) -> None:
    """Scores of pairs, their differences and losses."""
    label_pairs(trace, result)
    calls = zip(trace.of("bradley_terry_loss"), trace.of("centering_penalty"), strict=True)
    for (call, penalty), after in zip(calls, trace.after, strict=True):
        chosen, rejected, margin = (value.detach() for value in call.arguments.values())
        later = after.view(-1, 2)
        for n, difference in enumerate(chosen - rejected):
            logit = difference - margin[n]
            grown = later[n, 0] - later[n, 1]
            values = {"difference": difference, "margin": margin[n], "probability": logit.sigmoid()}
            values |= {"gradient_weight": (-logit).sigmoid(), "pair_loss": call.result[n]}
            values |= {"penalty": penalty.result[n], "difference_after": grown}
            pair: Record = {name: float(value.detach()) for name, value in values.items()}
            result["pairs"].append(pair | {"moved_as_wanted": bool(grown > difference)})


def add_dpo(trace: Trace, config: Any, result: Record) -> None:
    """Sums, D and the losses of pairs."""
    label_pairs(trace, result)
    refs = torch.cat([call.result for call in trace.of("of_batch")]).flatten().tolist()
    sums = [call.result for call in trace.of("sequence_logps", "main")]
    for record, sum_logp, ref in zip(
        result["completions"], torch.cat(sums).tolist(), refs, strict=True
    ):
        record |= {"sum_logp": sum_logp, "sum_ref_logp": ref}
    losses = torch.cat([call.result.detach() for call in trace.of("pair_losses")])
    for n, loss in enumerate(losses.tolist()):
        chosen, rejected = result["completions"][2 * n : 2 * n + 2]
        ref = chosen["sum_ref_logp"] - rejected["sum_ref_logp"]
        logit = chosen["sum_logp"] - rejected["sum_logp"] - ref
        after = chosen["completion_logp_after"] - rejected["completion_logp_after"] - ref
        scaled = torch.tensor(config.beta * logit, dtype=torch.float64)
        pair = {"logit": logit, "probability": float(scaled.sigmoid()), "pair_loss": loss}
        pair |= {"gradient_weight": config.beta * float((-scaled).sigmoid()), "logit_after": after}
        result["pairs"].append(pair | {"moved_as_wanted": after > logit})


def add_grpo(trace: Trace, config: Any, result: Record) -> None:
    """Candidates, who was kept, advantages, and the losses of the kept ones' tokens."""
    add_tokens(trace, config, result["completions"])
    selected = trace.of("select")[-1].result
    groups, num_candidates = selected.groups, selected.groups.rewards.shape[1]
    advantages = trace.of("advantages")[-1].result.flatten().tolist()
    slots = {int(candidate): slot for slot, candidate in enumerate(selected.candidates)}
    trained = {record["slot"]: record for record in result["completions"]}
    draws = [call.result for call in trace.of("uniform", "_keep_gumbel")]
    draws += [call.result for call in trace.of("uniform", "_rso_accepts")][:1]  # of the first pass
    keys = selection_keys(groups.rewards.double() / config.rejection_temperature, draws, config)
    result["completions"] = []
    for candidate, ids in enumerate(groups.rollouts.completion_ids):
        n, k = divmod(candidate, num_candidates)
        example, slot = groups.examples[n], slots.get(candidate)
        record: Record = {"row": example.row, "prompt_ids": example.prompt_ids, "ids": ids}
        record |= {"label": f"row {example.row + 1}, candidate {k + 1}", "kept": slot is not None}
        record |= {"reward": float(groups.rewards[n, k])}
        if draws:
            record |= {"draw": float(draws[0][n, k]), "key": float(keys[n, k])}
        logps = groups.rollouts.token_logps[candidate, : len(ids)].tolist()
        if slot is not None:
            record = trained.get(slot, {"tokens": {}}) | record | {"advantage": advantages[slot]}
            change = record.get("factor", 1.0) - 1
            record["moved_as_wanted"] = change * advantages[slot] > 0
        record.setdefault("tokens", {})["sampler_logp"] = logps
        result["completions"].append(record)
    for call in trace.of("_deviations", "group_advantages")[-1:]:
        rewards, deviations = call.arguments["rewards"].double(), call.result
        columns = (rewards - deviations)[:, 0].tolist(), deviations.std(1).tolist()
        rows = zip(groups.examples, *columns, strict=True)
        result["prompts"] = [{"row": e.row, "mean": mean, "std": std} for e, mean, std in rows]
    counts = trace.of("plan_updates")[-1].result[0].denominators
    result["step"] |= {
        "denominator": float(counts.num_sequences),
        "num_tokens": float(counts.num_tokens),
    }


def selection_keys(scores: Tensor, draws: Sequence[Tensor], config: Any) -> Tensor:
    """What decides who is kept, (N, K): scores are rewards over the temperature."""
    if config.rejection_method == "gumbel" and draws:
        return scores - torch.log(-torch.log(draws[0]))
    return (scores - scores.amax(1, keepdim=True)).exp()


def add_tokens(trace: Trace, config: Any, completions: Sequence[Record]) -> None:
    """The values of the kept completions' tokens on their way to the loss."""
    batches, policy = trace.batches, trace.of("policy_loss")
    columns = {
        "ratio": [call.result for call in trace.of("probability_ratio", "policy_loss")],
        "clipped": [call.result for call in trace.of("clipped_tokens")],
        "policy_term": [call.result for call in policy],
        "token_loss": [call.arguments["per_token"] for call in trace.of("aggregate")],
    }
    if kls := trace.of("kl_estimate", "grpo_loss"):
        refs = [call.arguments["ref_token_logps"] for call in kls]
        pairs = zip(trace.after, refs, strict=True)
        columns |= {"ref_logp": refs, "kl": [call.result for call in kls]}
        columns["kl_after"] = [
            kl_estimate(after, ref, estimator=config.kl_estimator) for after, ref in pairs
        ]
    for name, values in columns.items():
        for record, of_tokens in zip(completions, by_row(values, batches), strict=True):
            record["tokens"][name] = of_tokens
    for record in completions:
        losses = record["tokens"]["token_loss"]
        record["mean_loss"] = sum(losses) / max(1, len(losses))
