"""The gold reward of controlled sentiment generation: a classifier's probability of `positive`.

    --reward_funcs assets/recipes/sentiment/gold.py:positive
    --reward_funcs assets/recipes/sentiment/gold.py:FOLDER_OR_HUB_ID

The classifier is that of Rafailov et al. 2023, C.1, or the one that is named: any with a label
`positive`. Every process holds a copy (355M parameters).
"""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CLASSIFIER = "siebert/sentiment-roberta-large-english"
BATCH_SIZE = 64


def __getattr__(name: str) -> Any:
    """The same reward by another classifier, as if it were a function of this file."""
    if "/" not in name and not Path(name).is_dir():
        raise AttributeError(name)
    return functools.partial(positive, classifier_name=name)


@functools.cache
def classifier(name: str) -> tuple[Any, Any, int]:
    """Tokenizer, model and the number of the label `positive`."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(name, use_safetensors=True)
    labels = {name.lower(): number for name, number in model.config.label2id.items()}
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    return tokenizer, model.eval().to(device), labels["positive"]


@torch.no_grad()
def positive(
    prompts: list[str], completions: list[str], classifier_name: str = CLASSIFIER, **columns: Any
) -> list[float]:
    """Probability, in [0, 1], that a prompt with its completion is a positive review."""
    tokenizer, model, label = classifier(classifier_name)
    texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    found: list[float] = []
    for first in range(0, len(texts), BATCH_SIZE):
        part = texts[first : first + BATCH_SIZE]
        inputs = tokenizer(part, padding=True, truncation=True, return_tensors="pt")
        probabilities = model(**inputs.to(model.device)).logits.float().softmax(-1)  # (B, labels)
        found += probabilities[:, label].tolist()
    return found
