"""What a user can put right, told in one sentence."""


class UserError(ValueError):
    """Something the user can put right: a run prints it as one sentence and exits with status 2."""


def gist(error: BaseException) -> str:
    """The first sentence of an exception on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    return text.split(". ")[0][:240].rstrip(".")
