"""Preference pairs from samples of a policy, labelled by a gold reward, as files of rows.

    python -m experiments.sample_pairs --config assets/recipes/sentiment/pairs.yaml

The policy samples `num_candidates` completions of every prompt of both splits, the reward functions
score them, and `pair_method` says who is compared: `all` makes six pairs of four (Rafailov et al.
2023, C.1). Writes `train.jsonl` and the held-out split's file to `output_dir`, which is then a
`dataset_name`. The flags are those of DPO's `pair_method`; the policy is not trained.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from common import distributed, launch
from common.config.dpo import RolloutPairConfig, refuse_rollouts
from common.errors import UserError
from common.model import load
from common.pairs.from_rollouts import pairs_from_rollouts
from common.record.run_folder import save_run_files
from common.text.reading import held_out_split


@dataclass
class PairsConfig(RolloutPairConfig):
    """Rows have the column `prompt`."""

    def __post_init__(self) -> None:
        """Refuse values that make no pairs."""
        super().__post_init__()
        refuse_rollouts(self)


def main(config: PairsConfig) -> None:
    """Sample, score, pair and write both splits, the training split last."""
    distributed.seed_everything(config.seed)
    vocabulary = load.load_vocabulary(config)
    path, mesh = config.model_name_or_path, distributed.mesh(config.num_replicas)
    if distributed.is_rank0():
        save_run_files(Path(config.output_dir), config, distributed.world_size())
    held_out = held_out_split(config, config.dataset_name, is_trained_on=True)
    if not held_out:
        raise UserError("--dataset_test_split is required: pairs to evaluate on are made too.")
    splits = {held_out: config.num_eval_rows, config.dataset_train_split: config.num_train_rows}
    for split, num_rows in splits.items():
        model_config = load.read_model_config(path, "policy", vocabulary.tokenizer, config)
        of_split = replace(config, dataset_train_split=split, num_train_rows=num_rows)
        pairs_from_rollouts(of_split, vocabulary, model_config, mesh, f"{split}.jsonl")
        distributed.barrier()


if __name__ == "__main__":
    launch.run(main, PairsConfig)
