"""The gradient loop: batches are fair, steps are those of plain optimisers, arguments stay."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.core.descent import Data, OptimiserName, Rate, Slope, batches, descend, descent, pace
from lrbpfl.core.network import Params, forward
from lrbpfl.rng import generator


def numbered(n: int) -> Data:
    """Examples that know their own number."""
    return Data(x=torch.arange(n, dtype=torch.float32)[:, None], y=torch.arange(n))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 30), batch_size=st.integers(1, 40), steps=st.integers(0, 25), seed=st.integers(0, 9))
def test_every_pass_visits_every_example_once(n: int, batch_size: int, steps: int, seed: int) -> None:
    got = list(batches(numbered(n), batch_size, steps, generator(seed)))
    assert len(got) == steps
    assert all(len(batch.y) == len(batch.x) == min(batch_size, n) for batch in got)
    visits = [i for batch in got for i in batch.y.tolist()]
    for start in range(0, len(visits), n):
        one_pass = visits[start : start + n]
        assert len(set(one_pass)) == len(one_pass)


def test_examples_keep_their_labels() -> None:
    assert all(torch.equal(batch.x[:, 0].long(), batch.y) for batch in batches(numbered(10), 3, 20, generator(0)))


def test_batches_are_decided_by_the_generator() -> None:
    def order(seed: int) -> list[list[int]]:
        return [batch.y.tolist() for batch in batches(numbered(20), 6, 5, generator(seed))]

    assert order(0) == order(0) != order(1)


def test_passes_come_in_different_orders() -> None:
    first, second = (batch.y.tolist() for batch in batches(numbered(30), 30, 2, generator(0)))
    assert first != second and first != sorted(first)


def test_the_cosine_is_that_of_torch() -> None:
    rate = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rate, T_max=40)
    for t in range(40):
        assert pace("constant", t, 40) == 1.0
        assert pace("cosine", t, 40) == pytest.approx(rate.param_groups[0]["lr"], abs=1e-12)
        rate.step()
        schedule.step()
    assert pace("cosine", 0, 1) == 1.0, "a lone round is a whole one"


CENTRE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
START = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)


def bowl(w: Tensor, batch: Data) -> Tensor:
    return 0.5 * ((w - CENTRE) ** 2).sum()


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_quadratics_in_closed_form(steps: int) -> None:
    """w_R = a + (1 - eta)^R (w_0 - a) for f = |w - a|^2 / 2."""
    (w,), loss = descend(bowl, (START,), [numbered(1)] * steps, (Rate("sgd", 0.1),))
    torch.testing.assert_close(w, CENTRE + 0.9**steps * (START - CENTRE))
    distance = ((START - CENTRE) ** 2).sum().item()
    assert loss == pytest.approx(sum(0.5 * 0.81**r * distance for r in range(steps)) / steps)


def test_adam_begins_with_a_step_of_its_rate() -> None:
    (w,), _ = descend(bowl, (START,), [numbered(1)], (Rate("adam", 0.01),))
    torch.testing.assert_close(w, START - 0.01 * (START - CENTRE).sign())


def test_every_group_has_its_own_rate_and_optimiser() -> None:
    def F(a: dict[str, Tensor], b: Tensor, c: Tensor, batch: Data) -> Tensor:
        return bowl(a["w"], batch) + bowl(b, batch) + bowl(c, batch)

    rates = (Rate("sgd", 0.1), Rate("sgd", 0.0), Rate("adam", 0.5))
    (a, b, c), _ = descend(F, ({"w": START}, START, START), [numbered(1)], rates)
    torch.testing.assert_close(a["w"], START - 0.1 * (START - CENTRE))
    assert torch.equal(b, START)
    torch.testing.assert_close(c, START - 0.5 * (START - CENTRE).sign())


def test_no_step_changes_nothing() -> None:
    (w,), loss = descend(bowl, (START,), [], (Rate("sgd", 0.1),))
    assert torch.equal(w, START) and math.isnan(loss)


def test_arguments_stay_and_results_are_free_of_graphs() -> None:
    given, before = {"w": START.clone().requires_grad_(), "none": None}, START.clone()
    (got,), _ = descend(lambda p, batch: bowl(p["w"], batch), (given,), [numbered(1)] * 3, (Rate("adam", 0.1),))
    assert given["w"] is not None and torch.equal(given["w"], before) and given["w"].grad is None
    assert got["none"] is None and not got["w"].requires_grad and got["w"].data_ptr() != given["w"].data_ptr()


def test_a_rate_for_every_group() -> None:
    with pytest.raises(ValueError):
        descend(lambda a, b, batch: bowl(a, batch), (START, START), [numbered(1)], (Rate("sgd", 0.1),))


@pytest.mark.parametrize(
    ("optimiser", "kind"),
    [("sgd", torch.optim.SGD), ("momentum", partial(torch.optim.SGD, momentum=0.9)), ("adam", torch.optim.Adam)],
)
def test_the_same_bits_as_training_a_module(
    optimiser: OptimiserName, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    data = Data(x=torch.randn(20, 3, generator=generator(0, "x")), y=torch.randint(4, (20,), generator=generator(0)))

    def F(W: Params, batch: Data) -> Tensor:
        return nnf.cross_entropy(forward(model, W, batch.x), batch.y)

    start = {name: p.detach() for name, p in model.named_parameters()}
    (W,), mean = descend(F, (start,), batches(data, 8, 12, generator(1)), (Rate(optimiser, 0.05),))

    trained, losses = copy.deepcopy(model), []
    torch_optimiser = kind(trained.parameters(), lr=0.05, fused=True)
    for batch in batches(data, 8, 12, generator(1)):
        torch_optimiser.zero_grad()
        loss = nnf.cross_entropy(trained(batch.x), batch.y)
        loss.backward()
        torch_optimiser.step()
        losses.append(loss.item())
    assert trees.equal(W, {name: p.detach() for name, p in trained.named_parameters()})
    assert mean == pytest.approx(sum(losses) / len(losses))

    unfused = copy.deepcopy(model)
    plain = kind(unfused.parameters(), lr=0.05, foreach=False, fused=False)
    for batch in batches(data, 8, 12, generator(1)):
        plain.zero_grad()
        nnf.cross_entropy(unfused(batch.x), batch.y).backward()
        plain.step()
    torch.testing.assert_close(W, {name: p.detach() for name, p in unfused.named_parameters()})


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_gradients_that_are_written_down_lead_the_same_way(optimiser: OptimiserName) -> None:
    """For every leaf of every group its own; what is reported is what the objective says."""

    def F(a: dict[str, Tensor], b: Tensor, batch: Data) -> Tensor:
        return bowl(a["u"], batch) + 2 * bowl(a["v"], batch) + 3 * bowl(b, batch)

    def written(a: dict[str, Tensor], b: Tensor, batch: Data) -> Slope:
        with torch.no_grad():
            return Slope(F(a, b, batch), [a["u"] - CENTRE, 2 * (a["v"] - CENTRE), 3 * (b - CENTRE)])

    groups, rates = ({"u": START, "v": -START}, 2 * START), (Rate(optimiser, 0.1, decay=0.2), Rate("sgd", 0.05))
    one, other = (descend(f, groups, [numbered(1)] * 6, rates, clip=2.0) for f in (F, written))
    torch.testing.assert_close(one, other)


def test_a_growing_rate_by_hand() -> None:
    """Step r of plain SGD on |w - a|^2 / 2 leaves 1 - eta (1 + 0.5 r) of the distance; other groups keep their pace."""

    def F(w: Tensor, v: Tensor, batch: Data) -> Tensor:
        return bowl(w, batch) + bowl(v, batch)

    rates = Rate("sgd", 0.1, growth=0.5), Rate("sgd", 0.1)
    (w, v), _ = descend(F, (START, START), [numbered(1)] * 4, rates)
    torch.testing.assert_close(w, CENTRE + 0.9 * 0.85 * 0.8 * 0.75 * (START - CENTRE))
    torch.testing.assert_close(v, CENTRE + 0.9**4 * (START - CENTRE))


def test_adam_grows_by_the_same_shares() -> None:
    """Along a slope that never changes, Adam's steps are those of its rate."""
    found = descent(lambda w, batch: w, (torch.zeros(()),), [None] * 3, (Rate("adam", 0.01, growth=0.5),))
    places = [w.item() for (w,), _ in found]
    assert places == [pytest.approx(-0.01 * so_far, abs=1e-7) for so_far in (0, 1, 2.5, 4.5)]


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_one_way_comes_by_where_shorter_ones_end(optimiser: OptimiserName) -> None:
    """The point after r steps of a longer descent is that of r steps alone, bit for bit; losses are those before."""
    steps, rates = [numbered(1)] * 5, (Rate(optimiser, 0.1, growth=0.3),)
    way = [(w.detach().clone(), loss) for (w,), loss in descent(bowl, (START,), steps, rates)]
    assert len(way) == 6 and torch.equal(way[0][0], START) and math.isnan(way[0][1])
    for r in range(1, 6):
        (w,), mean = descend(bowl, (START,), steps[:r], rates)
        assert torch.equal(way[r][0], w)
        assert way[r][1] == bowl(way[r - 1][0], steps[0]).item()
        assert mean == pytest.approx(sum(loss for _, loss in way[1 : r + 1]) / r)


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_weight_decay_joins_the_gradient(optimiser: OptimiserName) -> None:
    """As if the objective had the term decay / 2 |w|^2."""

    def decayed(w: Tensor, batch: Data) -> Tensor:
        return bowl(w, batch) + 0.3 / 2 * w.square().sum()

    steps = [numbered(1)] * 7
    (got,), _ = descend(bowl, (START,), steps, (Rate(optimiser, 0.1, decay=0.3),))
    (expected,), _ = descend(decayed, (START,), steps, (Rate(optimiser, 0.1),))
    torch.testing.assert_close(got, expected)


def test_a_long_gradient_is_shortened_over_all_groups_together() -> None:
    """The gradient is (3, 4): its length 5 becomes 1, its direction stays; a short one is left alone."""

    def slope(a: Tensor, b: Tensor, batch: Data) -> Tensor:
        return 3 * a + 4 * b

    zeros, rates = (torch.zeros(()), torch.zeros(())), (Rate("sgd", 1.0), Rate("sgd", 1.0))
    clipped, _ = descend(slope, zeros, [numbered(1)], rates, clip=1.0)
    free, _ = descend(slope, zeros, [numbered(1)], rates, clip=5.1)
    torch.testing.assert_close(clipped, (torch.tensor(-0.6), torch.tensor(-0.8)), atol=1e-5, rtol=0)
    torch.testing.assert_close(free, (torch.tensor(-3.0), torch.tensor(-4.0)))


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_a_group_that_the_objective_left_out_rests(optimiser: OptimiserName) -> None:
    """No step by momentum alone, and none by decay."""

    def alternate(a: Tensor, b: Tensor, turn: int) -> Tensor:
        return bowl(a if turn else b, numbered(1))

    (a, b), _ = descend(alternate, (START, START), [1, 1, 0, 1], (Rate(optimiser, 0.1, decay=0.1),) * 2)
    (thrice,), _ = descend(bowl, (START,), [numbered(1)] * 3, (Rate(optimiser, 0.1, decay=0.1),))
    (once,), _ = descend(bowl, (START,), [numbered(1)], (Rate(optimiser, 0.1, decay=0.1),))
    assert torch.equal(a, thrice) and torch.equal(b, once)
