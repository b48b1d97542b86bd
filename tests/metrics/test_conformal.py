"""Prediction sets against another library, by simulation, and where they are delicate: ties, rounding, small parts."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mapie.classification import SplitConformalClassifier
from scipy import stats
from sklearn.base import BaseEstimator, ClassifierMixin

from lrbpfl.errors import BadInput
from lrbpfl.metrics import Predictions
from lrbpfl.metrics.conformal import Promise, chance, needed, promise, rank, set_scores, summarise_sets

Floats = npt.NDArray[np.float64]


def said(probs: Floats, y: npt.NDArray[Any]) -> Predictions:
    """Predictions of which sets use the probabilities and the labels."""
    nothing = np.zeros(len(y))
    return Predictions(probs=probs, y=y.astype(np.int64), total=nothing, aleatoric=nothing)


def softmax_model(n: int, rng: np.random.Generator, *, skill: float = 1.5, classes: int = 5) -> Predictions:
    """A model that is right in about 60 of 100 cases, and no judge of its own probabilities."""
    y = rng.integers(classes, size=n)
    logits = 2.0 * rng.normal(size=(n, classes))
    logits[np.arange(n), y] += 2.0 * skill
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return said(powers / powers.sum(axis=1, keepdims=True), y)


class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose inputs are its probabilities."""

    def fit(self, x: Floats, y: npt.NDArray[Any]) -> "Given":
        self.classes_, self.n_features_in_ = np.unique(y), x.shape[1]
        return self

    def predict_proba(self, x: Floats) -> Floats:
        return x

    def predict(self, x: Floats) -> npt.NDArray[Any]:
        return np.asarray(x.argmax(axis=1))


@pytest.mark.parametrize(("n", "coverage"), [(10, 0.9), (29, 0.9), (60, 0.8), (300, 0.9), (333, 0.75)])
def test_thresholds_and_sets_are_those_of_mapie(n: int, coverage: float) -> None:
    rng = np.random.default_rng(n)
    calibration, test = softmax_model(n, rng), softmax_model(500, rng)
    mine = promise(calibration, coverage)
    model = Given().fit(calibration.probs, np.arange(5))
    other = SplitConformalClassifier(model, confidence_level=coverage, conformity_score="lac", prefit=True)
    other.conformalize(calibration.probs, calibration.y)
    theirs = other.predict_set(test.probs)[1][:, :, 0]
    assert mine.threshold == pytest.approx(float(other._mapie_classifier.quantiles_[0]), abs=1e-7)
    ours = mine.sets(test.probs)
    empty = ~theirs.any(axis=1)
    assert (ours[~empty] == theirs[~empty]).all()
    assert (ours[empty].sum(axis=1) == 1).all() and ours[np.arange(500), test.probs.argmax(axis=1)].all()


def test_a_model_that_is_right_more_often_than_promised_has_singletons() -> None:
    """Most of its sets would be empty or full of one: with the likeliest class, all hold exactly that."""
    rng = np.random.default_rng(0)
    sure = softmax_model(400, rng, skill=9.0)
    given = promise(softmax_model(100, rng, skill=9.0), 0.8)
    assert (1 - sure.probs.max(axis=1) > given.threshold).any(), "no set would have been empty"
    told = set_scores(given, sure)
    assert told["set_size"] == told["singletons"] == 1.0 and told["coverage"] == sure.correct.mean()


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.99, 1 / 3])
def test_so_many_examples_are_needed_and_no_fewer(coverage: float) -> None:
    least = needed(coverage)
    assert rank(least, coverage) <= least
    with pytest.raises(BadInput, match=f"needs {least} calibration examples at least, not {least - 1}"):
        rank(least - 1, coverage)
    for confidence in (0.5, 0.9, 0.95, 0.999):
        least = needed(coverage, confidence)
        for n in (least, least + 1, 3 * least + 7):
            enough = stats.beta.sf(coverage, np.arange(1, n + 1), n + 1 - np.arange(1, n + 1)) >= confidence - 1e-12
            assert rank(n, coverage, confidence) == 1 + int(enough.argmax()) and enough.any()
        before = least - 1
        assert before == 0 or stats.beta.sf(coverage, before, 1) < confidence
        with pytest.raises(BadInput, match=f"confidence {confidence:g} needs {least} calibration"):
            rank(before, coverage, confidence)


def test_known_numbers() -> None:
    assert (needed(0.9), needed(0.95), needed(0.9, 0.95), needed(0.95, 0.95)) == (9, 19, 29, 59)  # 59: Wilks, 1941
    assert (rank(9, 0.9), rank(99, 0.55), rank(29, 0.9, 0.95)) == (9, 55, 29)


def coin(scores: Floats) -> Predictions:
    """Two classes: the true one, the first, has the scores, 1 - p; above a half it is never the likeliest."""
    return said(np.stack([1 - scores, scores], axis=1), np.zeros(len(scores)))


@pytest.mark.parametrize("n", [9, 29, 60, 300])
def test_the_average_promise_is_kept_on_average(n: int) -> None:
    """With uniform scores the coverage, given a calibration set, is the threshold itself."""
    rng, sets = np.random.default_rng(n), 3000
    covered = np.array([promise(coin(rng.random(n)), 0.9).threshold for _ in range(sets)])
    error = covered.std() / np.sqrt(sets)
    assert 0.9 - 4 * error <= covered.mean() <= 0.9 + 1 / (n + 1) + 4 * error
    p = softmax_model(100 * (n + 20), rng)
    shares = []
    for i in range(0, len(p.y), n + 20):
        part, rest = (said(p.probs[i + a : i + b], p.y[i + a : i + b]) for a, b in ((0, n), (n, n + 20)))
        shares.append(set_scores(promise(part, 0.9), rest)["coverage"])
    error = float(np.std(shares)) / 10
    assert 0.9 - 4 * error <= np.mean(shares) <= 0.9 + 1 / (n + 1) + 4 * error


@pytest.mark.parametrize("n", [29, 60, 300])
def test_the_confident_promise_fails_for_few_calibration_sets(n: int) -> None:
    rng, sets = np.random.default_rng(n), 3000
    covered = np.array([promise(coin(rng.random(n)), 0.9, 0.95).threshold for _ in range(sets)])
    failures = int((covered < 0.9).sum())
    assert stats.binomtest(failures, sets, 0.05, alternative="greater").pvalue > 0.001
    plain = np.array([promise(coin(rng.random(n)), 0.9).threshold for _ in range(sets)])
    assert stats.binomtest(int((plain < 0.9).sum()), sets, 0.05, alternative="greater").pvalue < 1e-9


def test_classes_at_the_threshold_are_in_the_set_before_and_after_storage() -> None:
    """Probabilities are stored in single precision; the sets of what was stored are those of the run."""
    third = np.full((9, 3), 1 / 3)
    given = promise(said(third, np.arange(9) % 3), 0.9)
    for probs in (third, third.astype(np.float32), third.astype(np.float32).astype(np.float64)):
        assert given.sets(probs).all()
    p = softmax_model(300, np.random.default_rng(1))
    given = promise(p, 0.9)
    stored = p.probs.astype(np.float32)
    assert (given.sets(p.probs) == given.sets(stored)).all()
    assert set_scores(given, p)["coverage"] * 300 == pytest.approx(rank(300, 0.9))  # no score is there twice


def test_what_is_no_row_of_probabilities_is_refused() -> None:
    given = Promise(coverage=0.9, confidence=None, threshold=0.5, examples=9)
    assert given.sets(np.zeros((0, 3))).shape == (0, 3)
    for wrong in ([[0.5, 0.5], [np.nan, 1.0]], [[0.5, 0.5], [3.0, -2.0]], [[0.5, 0.5], [4.0, 1.0]]):
        with pytest.raises(BadInput, match="row 1 does not"):
            given.sets(wrong)
    with pytest.raises(BadInput, match=r"not of numbers of shape \(2,\)"):
        given.sets([0.5, 0.5])
    for coverage, confidence in ((0.0, None), (1.0, None), (0.9, 1.0), (float("nan"), None)):
        with pytest.raises(BadInput, match="strictly between 0 and 1"):
            needed(coverage, confidence)


def test_the_range_of_chance_is_that_of_a_beta_binomial() -> None:
    for given, tested in ((Promise(0.9, None, 0.5, 9), 50), (Promise(0.8, 0.95, 0.5, 200), 33)):
        k = rank(given.examples, given.coverage, given.confidence)
        law = stats.betabinom(tested, k, given.examples + 1 - k)
        assert chance(given, tested) == (law.ppf(0.025) / tested, law.ppf(0.975) / tested)


def test_a_summary_weighs_examples_and_names_extremes() -> None:
    clients = {
        0: {"examples": 10.0, "coverage": 1.0, "set_size": 1.0},
        4: {"examples": 30.0, "coverage": 0.8, "set_size": 3.0},
    }
    assert summarise_sets(clients) == {
        "promises": 2, "coverage": 0.85, "coverage_worst": 0.8, "set_size": 2.5, "set_size_worst": 3.0,
    }  # fmt: skip
    assert summarise_sets({}) == {"promises": 0}
