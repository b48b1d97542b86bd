"""Scores of one client against other people's code, and summaries over clients by hand."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.metrics import brier_score_loss, log_loss

from lrbpfl.metrics import Predictions, ece, pool, reduce, reliability, scores, summarise

CLIENT_KEYS = {
    *("accuracy", "nll", "brier", "ece", "mce", "ece_floor", "ece_debiased"),
    *("total", "aleatoric", "epistemic", "examples"),
}
SUMMARY_KEYS = {
    *("accuracy", "accuracy_mean", "accuracy_worst", "nll", "nll_worst", "brier"),
    *("ece_pooled", "mce_pooled", "ece_pooled_floor", "ece_pooled_debiased", "ece_pooled_low", "ece_pooled_high"),
    *("ece_mean", "ece_worst", "ece_worst_decile", "ece_floor_mean", "ece_floor_worst", "ece_debiased_mean"),
    *("total", "aleatoric", "epistemic", "clients", "examples"),
}


def client(n: int, *, classes: int = 4, seed: int = 0) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    samples = torch.softmax(2 * torch.randn(3, n, classes, generator=rng), dim=2)
    labels = torch.multinomial(samples.mean(0), 1, generator=rng)[:, 0]
    return reduce(samples, labels)


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def federation(sizes: list[int]) -> dict[int, Predictions]:
    return {10 + i: client(n, seed=i) for i, n in enumerate(sizes)}


def test_likelihood_and_accuracy_match_scikit_learn() -> None:
    p = client(200)
    got = scores(p, seed=0)
    assert got["nll"] == pytest.approx(log_loss(p.y, p.probs, labels=range(4)))
    assert got["accuracy"] == pytest.approx(np.mean(p.probs.argmax(1) == p.y))


def test_brier_is_twice_the_binary_score() -> None:
    p = client(200, classes=2)
    assert scores(p, seed=0)["brier"] == pytest.approx(2 * brier_score_loss(p.y, p.probs[:, 1]))


def test_brier_by_hand() -> None:
    p = reduce(torch.tensor([[[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]]], dtype=torch.float64), torch.tensor([0, 2]))
    by_hand = ((0.5**2 + 0.3**2 + 0.2**2) + 2.0) / 2
    assert scores(p, seed=0)["brier"] == pytest.approx(by_hand)


def test_an_impossible_label_costs_a_finite_amount() -> None:
    p = reduce(torch.tensor([[[1.0, 0.0]]]), torch.tensor([1]))
    assert scores(p, seed=0)["nll"] == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_a_single_class_is_known() -> None:
    got = scores(reduce(torch.ones(2, 5, 1), torch.zeros(5, dtype=torch.long)), seed=0)
    zeros = dict.fromkeys(CLIENT_KEYS, 0.0)
    assert got == {**zeros, "accuracy": 1.0, "examples": 5.0}


def test_client_scores_are_floats_under_the_documented_keys() -> None:
    got = scores(client(30), seed=0)
    assert set(got) == CLIENT_KEYS
    assert {type(v) for v in got.values()} == {float}


def test_client_uncertainties_and_calibration_by_hand() -> None:
    """Two samples that disagree about the first of two examples; the second is wrong."""
    samples = torch.tensor([[[1.0, 0.0], [0.8, 0.2]], [[0.2, 0.8], [0.8, 0.2]]], dtype=torch.float64)
    got = scores(reduce(samples, torch.tensor([0, 1])), seed=3)
    means, each = [binary_entropy(0.6), binary_entropy(0.8)], [binary_entropy(0.8) / 2, binary_entropy(0.8)]
    assert got["total"] == pytest.approx(sum(means) / 2)
    assert got["aleatoric"] == pytest.approx(sum(each) / 2)
    assert got["epistemic"] == pytest.approx((sum(means) - sum(each)) / 2)
    gaps, noise = (1.0 - 0.6, 0.0 - 0.8), (math.sqrt(0.6 * 0.4), math.sqrt(0.8 * 0.2))
    assert (got["ece"], got["mce"], got["examples"]) == pytest.approx((0.6, 0.8, 2.0))

    def folded(s: float) -> float:
        pairs = zip(gaps, noise, strict=True)
        return float(np.mean([stats.foldnorm.mean(s * abs(gap) / sigma, scale=sigma) for gap, sigma in pairs]))

    assert got["ece_debiased"] == pytest.approx(0.6 * optimize.brentq(lambda s: folded(s) - 0.6, 0.0, 1.0))
    assert got["ece_floor"] == pytest.approx((2 * 0.6 * 0.4 + 2 * 0.8 * 0.2) / 2, abs=0.04)  # 200 draws: 4 errors


def test_the_seed_and_the_path_decide() -> None:
    p = client(30)
    floors = [scores(p, seed=s, path=path)["ece_floor"] for s, path in [(0, (1,)), (0, (1,)), (0, (2,)), (1, (1,))]]
    assert floors[0] == floors[1] and len(set(floors)) == 3


def test_the_summary_is_floats_under_the_documented_keys() -> None:
    got = summarise(federation([20, 30]), seed=0)
    assert set(got) == SUMMARY_KEYS
    assert {type(v) for v in got.values()} == {float}
    assert json.loads(json.dumps(got, allow_nan=False)) == got


def test_weighted_scores_are_those_of_the_pool() -> None:
    clients = federation([20, 300, 50])
    got, pooled = summarise(clients, seed=0), scores(pool(clients.values()), seed=0)
    for key in ("accuracy", "nll", "brier", "total", "aleatoric", "epistemic", "examples"):
        assert got[key] == pytest.approx(pooled[key])
    for key in ("ece", "mce", "ece_debiased"):
        assert got[key.replace("ce", "ce_pooled", 1)] == pytest.approx(pooled[key])
    assert got["ece_pooled_floor"] == pytest.approx(pooled["ece_floor"], rel=0.1)  # other draws


def test_means_and_extremes_count_every_client_once() -> None:
    clients = federation([20, 300, 50])
    each = [scores(p, seed=5, path=(k,)) for k, p in clients.items()]
    got = summarise(clients, seed=5)
    for key in ("accuracy", "ece", "ece_floor", "ece_debiased"):
        assert got[f"{key}_mean"] == pytest.approx(np.mean([s[key] for s in each]))
    assert got["accuracy_worst"] == min(s["accuracy"] for s in each)
    assert got["ece_worst"] == max(s["ece"] for s in each)
    assert got["nll_worst"] == max(s["nll"] for s in each)
    assert (got["clients"], got["examples"]) == (3.0, 370.0)
    assert got["accuracy"] != pytest.approx(got["accuracy_mean"], abs=1e-4)


@pytest.mark.parametrize(("count", "tenth"), [(1, 1), (9, 1), (20, 2), (21, 3)])
def test_the_worst_decile_is_at_least_a_tenth(count: int, tenth: int) -> None:
    clients = federation([15] * count)
    worst = sorted((scores(p, seed=0)["ece"] for p in clients.values()), reverse=True)[:tenth]
    assert summarise(clients, seed=0)["ece_worst_decile"] == pytest.approx(np.mean(worst))


def test_the_worst_floor_is_that_of_the_worst_of_calibrated_clients() -> None:
    clients, rng = federation([40] * 12), np.random.default_rng(0)
    labels = [[rng.binomial(1, p.confidence) for p in clients.values()] for _ in range(300)]
    diagrams = [[reliability(p.confidence, y) for p, y in zip(clients.values(), ys, strict=True)] for ys in labels]
    worst = [max(map(ece, row)) for row in diagrams]
    got = summarise(clients, seed=0)
    error = float(np.std(worst)) * math.sqrt(1 / 300 + 1 / 200)
    assert got["ece_floor_worst"] == pytest.approx(np.mean(worst), abs=4 * error)
    assert got["ece_floor_worst"] > 1.2 * max(scores(p, seed=0, path=(k,))["ece_floor"] for k, p in clients.items())


def test_one_client_is_its_own_mean_worst_and_pool() -> None:
    got = summarise(federation([80]), seed=0)
    assert got["ece_mean"] == got["ece_worst"] == got["ece_worst_decile"] == got["ece_pooled"]
    assert got["ece_floor_mean"] == pytest.approx(got["ece_floor_worst"])
    assert got["ece_floor_mean"] == pytest.approx(got["ece_pooled_floor"])


def test_pooling_lowers_the_floor() -> None:
    got = summarise(federation([50] * 16), seed=0)
    assert got["ece_floor_mean"] / got["ece_pooled_floor"] == pytest.approx(4.0, rel=0.25)


def test_the_interval_of_a_pool_is_about_clients_unless_there_are_few() -> None:
    """Clients of unequal sizes who are all right or all wrong: as clients they tell little, as examples much."""

    def width(count: int) -> float:
        sizes = [40 + 80 * (k % 3) for k in range(count)]
        clients = {k: reduce(torch.tensor([[[0.2, 0.8]] * n]), torch.full((n,), k % 2)) for k, n in enumerate(sizes)}
        got = summarise(clients, seed=2)
        return got["ece_pooled_high"] - got["ece_pooled_low"]

    assert width(2) < 0.2 and width(7) < 0.1
    assert width(8) > 0.5


def test_a_summary_depends_on_the_seed_and_not_on_the_order() -> None:
    clients = federation([20, 30, 40])
    backwards = dict(reversed(clients.items()))
    assert summarise(clients, seed=1) == summarise(backwards, seed=1) != summarise(clients, seed=2)


def test_known_scores_are_taken_as_they_are() -> None:
    clients = federation([20, 30])
    known = {k: scores(p, seed=0, path=(k,)) for k, p in clients.items()}
    assert summarise(clients, known, seed=0) == summarise(clients, seed=0)
    known[10]["nll"] = 99.0
    assert summarise(clients, known, seed=0)["nll_worst"] == 99.0


def test_a_summary_needs_clients_and_their_own_scores() -> None:
    with pytest.raises(ValueError, match="no clients"):
        summarise({}, seed=0)
    clients = federation([20])
    with pytest.raises(ValueError, match="other clients"):
        summarise(clients, {3: scores(clients[10], seed=0)}, seed=0)
