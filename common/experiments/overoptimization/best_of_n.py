"""Best-of-n sampling: its reward from one pool of samples, and its KL in closed form.

A policy that draws n completions and gives out the one that a proxy reward likes best is never run:
every n up to N is estimated from the same N samples of a prompt.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def best_of_n(proxy: ArrayLike, values: ArrayLike, sizes: Sequence[int]) -> NDArray[np.float64]:
    """The expected value of the completion that the proxy likes best among n.

    The mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I; Gao et al.
    2022, section 2): with the samples in ascending order of the proxy, the i-th of them, counted
    from 1, is the best of C(i - 1, n - 1) of the C(N, n) subsets. It is unbiased for every n up to
    N, and varies less than n samples drawn for the purpose. Of equal proxy rewards each is taken as
    often as the others.

    Args:
        proxy: (P, N) rewards that choose.
        values: (P, N) what is wanted of the chosen one; the proxy itself, or a gold reward.
        sizes: of the groups, each from 1 to N.

    Returns:
        (S, P) for each size the estimate of each prompt.
    """
    proxy, values = np.asarray(proxy, np.float64), np.asarray(values, np.float64)
    assert proxy.shape == values.shape, f"{proxy.shape} of the proxy, {values.shape} values"
    assert proxy.ndim == 2, f"shape {proxy.shape}, prompts and samples expected"
    order = proxy.argsort(axis=1, kind="stable")  # (P, N)
    ranked = np.take_along_axis(proxy, order, 1)
    in_order = np.take_along_axis(values, order, 1)
    for row, ties in zip(in_order, ranked, strict=True):
        _average_ties(row, ties)
    shares = np.stack([share_of_subsets(proxy.shape[1], size) for size in sizes])  # (S, N)
    result: NDArray[np.float64] = shares @ in_order.T
    return result


def _average_ties(values: NDArray[np.float64], ranked: NDArray[np.float64]) -> None:
    """Give samples (N,) with the same proxy reward, which are neighbours, their mean, in place."""
    starts = np.flatnonzero(np.diff(ranked, prepend=np.nan) != 0)
    counts = np.diff(starts, append=len(ranked))
    values[:] = np.repeat(np.add.reduceat(values, starts) / counts, counts)


def share_of_subsets(num_samples: int, size: int) -> NDArray[np.float64]:
    """In which share of all subsets of `size` each of N samples is the best, (N,) ascending.

    Raises:
        ValueError: more are wanted than there are, or none.
    """
    if not 1 <= size <= num_samples:
        raise ValueError(f"the best of {size} cannot be estimated from {num_samples} samples")
    below = range(num_samples)  # how many samples are worse
    total = math.comb(num_samples, size)
    return np.array([math.comb(worse, size - 1) / total for worse in below])


def best_of_n_kl(size: int) -> float:
    """KL(best of n || policy) = log n - (n - 1) / n, in nats (Stiennon et al. 2020, appendix G.3).

    Exact where no two completions of a prompt have the same proxy reward and each has a small
    probability. Completions that come more than once are ties with themselves, so for a policy with
    finite support this is an upper bound (Beirami et al. 2024, theorem 1): the true distance of its
    best of n is shorter.
    """
    return math.log(size) - (size - 1) / size
