"""What a comparison says in words: checked against sentences written by hand, whoever wins."""

import pytest

from lrbpfl.reports.verdict import verdict


def scores(accuracy: float, nll: float) -> dict[str, float]:
    return {"accuracy": accuracy, "nll": nll}


ALONE, SHARED = scores(0.871, 0.512), scores(0.751, 0.716)


def test_who_wins_is_told_with_how_much() -> None:
    summary = {"lr-bpfl": scores(0.912, 0.262), "fedavg": SHARED, "fedavg-ft": scores(0.90, 0.3), "local": ALONE}
    best = {"nll": {"lr-bpfl"}, "ece_pooled": {"lr-bpfl"}, "accuracy": {"local", "fedavg-ft", "lr-bpfl"}}
    assert verdict(summary, best) == (
        "lr-bpfl is 4.1 points and 0.25 nats ahead of training alone (local), and 16.1 points and 0.45 nats ahead of "
        "one network for all (fedavg). Of the 4, it is among the best in accuracy; it has the best likelihood and "
        "calibration, as far as these clients can tell."
    )


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (scores(0.851, 0.612), "2.0 points and 0.10 nats behind training alone (local)"),
        (scores(0.891, 0.532), "2.0 points ahead of training alone (local) but 0.02 nats behind"),
        (scores(0.851, 0.412), "0.10 nats ahead of training alone (local) but 2.0 points behind"),
        (scores(0.8712, 0.612), "0.10 nats behind training alone (local)"),
        (scores(0.8708, 0.5122), "level with training alone (local)"),
    ],
)
def test_what_is_lost_is_told_too(mine: dict[str, float], said: str) -> None:
    assert verdict({"lr-bpfl:paper": mine, "local": ALONE}, {}) == f"lr-bpfl:paper is {said}."
    told = verdict({"lr-bpfl": mine, "local": ALONE}, {"accuracy": {"local"}})
    assert told == f"lr-bpfl is {said}. Of the 2, local has the best accuracy, as far as these clients can tell."


def test_without_lr_bpfl_it_is_about_the_best_likelihood() -> None:
    summary = {"fedavg": SHARED, "fedavg-ft": scores(0.8, 0.4), "pfedme": scores(0.9, 0.5)}
    assert verdict(summary, {}) == "fedavg-ft is 4.9 points and 0.32 nats ahead of one network for all (fedavg)."
    pair = verdict({"local": ALONE, "fedavg": SHARED}, {})
    assert pair == "fedavg is 12.0 points and 0.20 nats behind training alone (local)."


def test_others_that_are_best_are_named_and_ties_share_it() -> None:
    best = {"accuracy": {"pfedme", "local"}, "nll": {"pfedme"}, "ece_pooled": {"pfedme", "local"}}
    told = verdict({"lr-bpfl": SHARED, "local": ALONE, "pfedme": ALONE}, best)
    assert told is not None and told.endswith(
        " Of the 3, local and pfedme share the best accuracy and calibration; pfedme has the best likelihood, "
        "as far as these clients can tell."
    )


@pytest.mark.parametrize(
    "summary",
    [
        {"lr-bpfl": ALONE, "pfedme": SHARED},
        {"local": ALONE},
        {"lr-bpfl": ALONE},
        {"lr-bpfl": ALONE, "local": {"seconds": 1.0}},
        {"lr-bpfl": {**ALONE, "nll": None}, "local": ALONE},
    ],
)
def test_nothing_is_said_where_there_is_nothing_to_hold_it_against(summary: dict[str, dict[str, float]]) -> None:
    assert verdict(summary, {"nll": {"lr-bpfl"}}) is None
