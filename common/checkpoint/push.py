"""Uploading an exported model to the Hugging Face hub."""

from pathlib import Path

from common import distributed
from common.config.flags import HubFlags
from common.errors import UserError, gist


def prepare(config: HubFlags) -> None:
    """Create the repository on the hub before training, with `push_to_hub`.

    Raises:
        UserError: the hub does not answer, or does not let this user write there.
    """
    from huggingface_hub import HfApi

    private = config.hub_private_repo or None  # None: the account's default
    try:
        if config.push_to_hub:
            HfApi().create_repo(config.hub_model_id, private=private, exist_ok=True)
    except Exception as error:  # also of the HTTP library
        raise UserError(
            f"--push_to_hub: {config.hub_model_id} cannot be written on the hub ({gist(error)}); "
            "log in with `hf auth login`, or leave the flag out and upload the folder later."
        ) from None


def push(output_dir: Path, config: HubFlags) -> None:
    """With `push_to_hub`, upload `model`, and `adapter` as a folder of that name. Rank 0 only.

    Raises:
        RuntimeError: it failed; says how to upload by hand.
    """
    from huggingface_hub import HfApi

    repo = config.hub_model_id
    for place, folder in ((".", output_dir / "model"), ("adapter", output_dir / "adapter")):
        if config.push_to_hub and distributed.is_rank0() and folder.is_dir():
            try:
                HfApi().upload_folder(repo_id=repo, folder_path=str(folder), path_in_repo=place)
            except Exception as error:
                raise RuntimeError(
                    f"the model is whole in {output_dir / 'model'} and not on the hub; "
                    f"`hf upload {repo} {folder} {place}` uploads it"
                ) from error
