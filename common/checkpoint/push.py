"""Uploading an exported model to the Hugging Face hub."""

from pathlib import Path

from common import distributed
from common.config import HubConfig
from common.errors import UserError, gist
from common.text import hub


def prepare(config: HubConfig) -> None:
    """Make the repository before anything is trained for it, if the model is to be pushed.

    Raises:
        UserError: the hub does not answer, or does not let this user write there.
    """
    if not config.push_to_hub:
        return
    reason = "it does not answer); look at the connection"
    if hub.is_reachable():
        from huggingface_hub import HfApi

        private = config.hub_private_repo or None  # as the account has it
        try:
            HfApi().create_repo(config.hub_model_id, private=private, exist_ok=True)
            return
        except Exception as error:  # of its HTTP library too
            reason = f"{gist(error)}); log in with `hf auth login`"
    raise UserError(
        f"--push_to_hub: {config.hub_model_id} cannot be written on the hub ({reason}, or "
        "leave the flag out and upload the exported folder later."
    )


def push(output_dir: Path, config: HubConfig) -> None:
    """Upload `model`, and `adapter` into a folder of that name, if asked for. Collective.

    Raises:
        RuntimeError: that failed; says how to do it by hand.
    """
    failure, repo = "", config.hub_model_id
    folders = {".": output_dir / "model", "adapter": output_dir / "adapter"}
    if config.push_to_hub and distributed.is_rank0():
        from huggingface_hub import HfApi

        try:
            for place, folder in folders.items():
                if folder.is_dir():
                    HfApi().upload_folder(repo_id=repo, folder_path=str(folder), path_in_repo=place)
        except Exception as error:  # of its HTTP library too
            failure = (
                f"the model is whole in {output_dir / 'model'} and not on the hub ({gist(error)}); "
                f"`hf upload {repo} {folder} {place}` uploads it"
            )
    if failure := distributed.from_rank0(failure):
        raise RuntimeError(failure)
