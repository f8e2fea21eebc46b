"""The gold reward of controlled sentiment generation: a classifier's probability of `positive`.

The classifier is that of Rafailov et al. 2023, C.1. Every process holds a copy (355M parameters).
"""

import functools
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CLASSIFIER = "siebert/sentiment-roberta-large-english"
BATCH_SIZE = 64


@functools.cache
def classifier() -> tuple[Any, Any, int]:
    """Tokenizer, model and the number of the label `positive`."""
    tokenizer = AutoTokenizer.from_pretrained(CLASSIFIER)
    model = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER, use_safetensors=True)
    labels = {name.lower(): number for name, number in model.config.label2id.items()}
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    return tokenizer, model.eval().to(device), labels["positive"]


@torch.no_grad()
def positive(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Probability, in [0, 1], that a prompt with its completion is a positive review."""
    tokenizer, model, label = classifier()
    texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    found: list[float] = []
    for first in range(0, len(texts), BATCH_SIZE):
        part = texts[first : first + BATCH_SIZE]
        inputs = tokenizer(part, padding=True, truncation=True, return_tensors="pt")
        probabilities = model(**inputs.to(model.device)).logits.float().softmax(-1)  # (B, labels)
        found += probabilities[:, label].tolist()
    return found
