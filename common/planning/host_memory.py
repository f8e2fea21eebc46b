"""What saving takes of the host's memory: a checkpoint while training goes on, and the export.

Of a GPU run that is beside the GPU, of a CPU run in the memory that computes as well. Counted are
the checkpoints of `save_steps`; a run that is asked to stop writes one without it, too.
"""

from collections.abc import Sequence

from common.planning.footprint import Footprint
from common.planning.work import FLOAT32, MOMENTS_OF_ADAM, Run

# Of a shard, while it is written: safetensors makes a buffer of the whole file (`serialize`), of
# which torch's writer is handed a copy, as Python's bytes (`safetensors.torch.save`).
WRITER_COPIES = 2
HOST_COLUMNS = ("offloaded", "checkpoint's copy", "writing it", "export on rank 0", "most")


def state_bytes(run: Run, ranks: int) -> float:
    """A rank's part of a checkpoint (`state.trained_state`).

    Float32 shards of what is trained and both its moments, and of a reference that is updated:
    inside a policy with adapters that is a frozen copy of them.
    """
    shards = run.num_shards(ranks)
    trained = run.policy.numbers(shards, trained=True)
    numbers = (1 + MOMENTS_OF_ADAM) * trained
    if getattr(run.config, "ref_update_steps", 0) > 0:
        numbers += run.reference.numbers(shards) if run.reference else trained
    return float(FLOAT32 * numbers)


def copied_bytes(run: Run, ranks: int) -> float:
    """The copy of it that is written from: if training goes on, and of what a GPU holds.

    It stays for a while after it was written, until Python collects what refers to itself.
    """
    is_elsewhere = run.on_gpu and not run.is_offloaded
    is_copied = bool(run.config.save_steps) and (run.config.async_save or is_elsewhere)
    return state_bytes(run, ranks) * is_copied


def written_bytes(run: Run, ranks: int) -> float:
    """What the writing of it takes beside."""
    return WRITER_COPIES * state_bytes(run, ranks) if run.config.save_steps else 0.0


def export_bytes(run: Run, ranks: int) -> float:
    """On rank 0 the whole model that is written, and a copy of its bytes by safetensors.

    In one plain process on a CPU the first is the model itself.
    """
    is_there = run.is_plain(ranks) and not run.on_gpu
    return float(FLOAT32 * run.policy.numbers() * (1 if is_there else 2))


def offloaded_bytes(run: Run, ranks: int, models: Sequence[Footprint]) -> float:
    """Shards on the host of a GPU: of these models, of moments and of gradients."""
    if not run.is_offloaded:
        return 0.0
    shards = run.num_shards(ranks)
    numbers = sum(model.numbers(shards) for model in models)
    numbers += (MOMENTS_OF_ADAM + 1) * run.policy.numbers(shards, trained=True)
    return float(FLOAT32 * numbers)


def host_bytes(run: Run, ranks: int, models: Sequence[Footprint]) -> dict[str, float]:
    """What a GPU's process holds on its host, by column.

    At once there is what is offloaded, and a save or, once that has ended, the export.

    Args:
        run: on GPUs.
        ranks: of it.
        models: that stay in memory while it trains.
    """
    held = offloaded_bytes(run, ranks, models)
    copied, writing = copied_bytes(run, ranks), written_bytes(run, ranks)
    export = export_bytes(run, ranks)
    most = held + max(copied + writing, export)
    return dict(zip(HOST_COLUMNS, (held, copied, writing, export, most), strict=True))
