"""The reward and the reference of the run that wrote a policy."""

from pathlib import Path

from common.evaluation.split import ImplicitReward
from common.record.run_folder import config_of_run


def reward_of_run(path: str) -> ImplicitReward:
    """The reward by which the run that wrote a policy judges pairs; of no run log(pi / ref)."""
    settings = config_of_run(path)
    names = ("loss_type", "reference_free", "ld_alpha")
    is_dpo = all(name in settings for name in names)
    options = {name: settings[name] for name in names} if is_dpo else {}
    return ImplicitReward(beta=settings.get("beta") or 1.0, **options)


def reference_of_run(path: str) -> str:
    """The reference, or else the start, of the run that wrote a policy; "" where none is there."""
    from common.text.sources import is_id

    settings = config_of_run(path)
    paths = (settings.get(name) for name in ("ref_model_name_or_path", "model_name_or_path"))
    reference = next((p for p in paths if p and p != path), "")
    return reference if reference and (Path(reference).is_dir() or is_id(reference)) else ""
