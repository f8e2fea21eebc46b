"""Plans of memory compared with runs, in a sentence."""

from experiments.evidence.records.studies import columns


def plans() -> str:
    """How near the plans of memory are to what runs took."""
    ratios = sorted(map(float, columns("plans")["planned / in use"]))
    return (
        f"Of {len(ratios)} real runs on a CPU plans are {ratios[0]:.2f} to {ratios[-1]:.2f} of the "
        "memory in use."
    )


TABLES = {"plans": plans}
