"""Small finished runs, written as the runner writes them, and a browser to look at pages."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright
from safetensors.torch import save_file

from lrbpfl.experiments.config import parse
from lrbpfl.experiments.store import Run
from lrbpfl.metrics import Predictions, reduce, scores, summarise
from lrbpfl.rng import numpy_generator

ROUNDS = 4
Open = Callable[..., Page]


def write_run(
    path: Path,
    *,
    algorithm: str = "fedavg",
    clients: int = 3,
    classes: int = 4,
    examples: int = 60,
    names: Sequence[str] | None = None,
    new: Sequence[float] = (),
    class_names: Sequence[str] | None = None,
    layers: Sequence[str] = (),
    federation: dict[str, Any] | None = None,
    skill: float = 3.0,
) -> Path:
    """A finished run with random predictions, and two new clients of each alpha in `new`.

    Runs of one skill predict the same. With layers, client k has rank 1 + k % 3 of 3 in each.
    """
    settings = {"rounds": ROUNDS, "cohort": 2, "evaluate_every": 2, **(federation or {})}
    config = parse({"data": {"clients": clients}, "federation": settings, "algorithm": {"name": algorithm}})
    run = Run.create(path, config)
    alphas = {clients + i: alpha for i, alpha in enumerate(np.repeat(new, 2).tolist())}
    predictions = {k: _predictions(k, classes, examples, skill) for k in range(clients + len(alphas))}
    per_client = {k: scores(p, seed=0, path=(k,)) for k, p in predictions.items()}

    def pool(alpha: float | None) -> dict[str, float]:
        some = [k for k in predictions if alphas.get(k) == alpha]
        return summarise({k: predictions[k] for k in some}, {k: per_client[k] for k in some}, seed=0)

    pooled = pool(None)
    for t in (2, ROUNDS):
        for k, own in per_client.items():
            about = {"round": t, "client": k, **({"new_alpha": alphas[k]} if k in alphas else {})}
            if t == ROUNDS or k not in alphas:
                run.record.append({**about, "metric": metric, "value": value} for metric, value in own.items())
        run.record.append({"round": t, "metric": metric, "value": value} for metric, value in pooled.items())
    costs = {"bytes_up": 2e6, "bytes_down": 1e6, "seconds": 12.5, "parameters": 1234, "events": 0}
    whole: dict[str, Any] = {
        **pooled,
        **costs,
        "evaluated": "each client's own model after round 4, on its own test split",
    }
    stacked = {
        "client": np.repeat(np.arange(len(predictions)), examples),
        "y": np.concatenate([p.y for p in predictions.values()]),
        **{
            field: np.concatenate([getattr(p, field) for p in predictions.values()]).astype(np.float32)
            for field in ("probs", "total", "aleatoric")
        },
    }
    if new:
        whole["new"] = {str(alpha): pool(alpha) for alpha in new}
        stacked["new_alpha"] = np.repeat([alphas.get(k, 0.0) for k in predictions], examples)
    save_file({name: torch.from_numpy(array) for name, array in stacked.items()}, path / "predictions.safetensors")
    for k in predictions if layers else ():
        (path / "clients" / f"{k:05d}").mkdir(parents=True)
        gamma = torch.tensor([math.inf, 3.5, 3.5])
        gamma[1 + k % 3 :] = -math.inf
        save_file(
            {f"own/gates/{name}": gamma.clone() for name in layers}, path / f"clients/{k:05d}/personal.safetensors"
        )
    if names:
        (path / "clients.json").write_text(json.dumps(list(names)))
    if class_names:
        (path / "classes.json").write_text(json.dumps(list(class_names)))
    (path / "summary.json").write_text(json.dumps({algorithm: whole}))
    return path


def _predictions(k: int, classes: int, examples: int, skill: float) -> Predictions:
    """Two sampled models that favour the true class, less so with each client."""
    rng = numpy_generator(0, "predictions", k)
    y = rng.integers(classes, size=examples)
    logits = rng.normal(size=(2, examples, classes))
    logits[:, np.arange(examples), y] += skill / (1 + k % 4)
    return reduce(torch.from_numpy(logits).softmax(-1), torch.from_numpy(y))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium of the system."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium is installed here")
    with sync_playwright() as driver:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens a page; at the end, none may have asked a network for anything or complained."""
    complaints: list[str] = []
    pages: list[Page] = []

    def open_page(file: Path, *, width: int = 1280, **options: Any) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url == file.as_uri() else complaints.append(request.url))
        page.goto(file.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []
