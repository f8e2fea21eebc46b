"""SFT term: a tie to the chosen completion, in a sum. RPO, Pang et al. 2024, eq. 1.

    loss = -log pi_w / |y_w|

RPO divides by the length of chain of thought and answer; here a completion is one text.
"""

PER_TOKEN = True


def sft(chosen_logps):
    """Loss of each pair (N,).

    >>> sft(torch.tensor([-1.5]))  # of two tokens with log-probs of -1 and -2
    tensor([1.5000])
    """
    return -chosen_logps
