"""Per-FedAvg against FedAvg, closed forms on quadratics and derivatives taken in other ways."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms import per_fedavg
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.per_fedavg import PerFedAvg, Variant, meta_gradient
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data, batches
from lrbpfl.core.network import Params
from lrbpfl.rng import generator
from tests.algorithms.hand import ToyRun, accuracy, gradient, loaded, play, predict, start
from tests.conftest import CLASSES, FEATURES, Toy, blobs

both = pytest.mark.parametrize("variant", ["fo", "hf"])
EVERYTHING = 1000  # a batch size beyond every client's data


def moved(w: Params, direction: Params, length: float) -> Params:
    return {name: p + length * direction[name] for name, p in w.items()}


def update(algorithm: PerFedAvg | FedAvg, toy: Toy, w: Params, k: int = 0) -> Params:
    upload, _, _ = algorithm.client_update(toy.task, w, None, toy.train[k], generator(0))
    return upload


@both
def test_without_the_inner_step_it_is_fedavg_on_the_second_batches(toy: Toy, variant: Variant) -> None:
    data, w = toy.train[3], start(PerFedAvg(), toy).server
    algorithm = PerFedAvg(variant=variant, alpha=0, beta=0.3, local_steps=7, batch_size=16)
    rng = generator(0)
    next(batches(data, 16, 7, rng))  # D; what is drawn next is D'
    expected, _, told = FedAvg(lr=0.3, local_steps=7, batch_size=16).client_update(toy.task, w, None, data, rng)
    upload, _, info = algorithm.client_update(toy.task, w, None, data, generator(0))
    torch.testing.assert_close(upload, expected)
    assert info["loss"] == pytest.approx(told["loss"])


@both
def test_without_the_inner_step_and_with_full_batches_runs_are_those_of_fedavg(toy: Toy, variant: Variant) -> None:
    algorithm = PerFedAvg(variant=variant, alpha=0, beta=0.3, local_steps=4, batch_size=EVERYTHING)
    fedavg = FedAvg(lr=0.3, local_steps=4, batch_size=EVERYTHING)
    begin = start(fedavg, toy)
    assert trees.equal(start(algorithm, toy), begin)
    end = play(algorithm, toy, begin, range(3)).server
    torch.testing.assert_close(end, play(fedavg, toy, begin, range(3)).server)
    another = play(PerFedAvg(alpha=0.3, beta=0.3, local_steps=4, batch_size=EVERYTHING), toy, begin, range(3)).server
    with pytest.raises(AssertionError):
        torch.testing.assert_close(another, end)


def curvatures(count: int, dim: int = 3) -> list[Tensor]:
    """Symmetric positive definite matrices that do not commute."""
    factors = torch.randn(count, dim, dim, dtype=torch.float64, generator=generator(0, "curvatures"))
    return [F @ F.T + 0.1 * torch.eye(dim, dtype=torch.float64) for F in factors]


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.3])
def test_quadratics_in_closed_form(alpha: float) -> None:
    """f(w; D) = (w - a)' A_D (w - a) / 2, every batch with its own curvature: each has its place in the product."""
    A, A1, A2 = curvatures(3)
    a, w = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([4.0, 3.0, -1.0]).double()
    one = torch.eye(3).double()

    def f(w: Params, batch: Data) -> Tensor:
        value: Tensor = 0.5 * (w["w"] - a) @ batch.x @ (w["w"] - a)
        return value

    triple = [Data(x=curvature, y=torch.zeros(0)) for curvature in (A, A1, A2)]
    fo, loss = meta_gradient(f, {"w": w}, *triple, alpha=alpha, variant="fo")
    hf, _ = meta_gradient(f, {"w": w}, *triple, alpha=alpha, variant="hf")
    first_order = A1 @ (one - alpha * A) @ (w - a)
    torch.testing.assert_close(fo["w"], first_order)
    torch.testing.assert_close(hf["w"], (one - alpha * A2) @ first_order)
    u = w - alpha * A @ (w - a)
    assert loss == pytest.approx((0.5 * (u - a) @ A1 @ (u - a)).item())


class Small:
    """An MLP of 31 smooth parameters in float64, with its loss on three batches."""

    def __init__(self) -> None:
        rng = generator(0, "small")
        self.w = {
            "one": torch.randn(5, 3, dtype=torch.float64, generator=rng),
            "bias": torch.randn(5, dtype=torch.float64, generator=rng),
            "two": torch.randn(2, 5, dtype=torch.float64, generator=rng),
        }
        y = torch.tensor([0, 1, 0, 1, 1, 0])
        self.batches = [Data(x=torch.randn(6, 3, dtype=torch.float64, generator=rng), y=y) for _ in range(3)]

    @staticmethod
    def f(w: Params, batch: Data) -> Tensor:
        return nnf.cross_entropy(torch.tanh(batch.x @ w["one"].T + w["bias"]) @ w["two"].T, batch.y)

    def flat(self, w: Params) -> Tensor:
        return torch.cat([w[name].flatten() for name in self.w])

    def flat_f(self, vector: Tensor, batch: Data) -> Tensor:
        parts = torch.split(vector, [p.numel() for p in self.w.values()])
        return self.f({name: v.view_as(p) for v, (name, p) in zip(parts, self.w.items(), strict=True)}, batch)

    def flat_gradient(self, vector: Tensor, batch: Data) -> Tensor:
        vector = vector.detach().requires_grad_()
        (g,) = torch.autograd.grad(self.flat_f(vector, batch), vector)
        return g

    def hessian_term(self, alpha: float) -> tuple[Tensor, Tensor]:
        """What `hf` takes from `fo`, divided by alpha; and the vector that it multiplied."""
        fo, hf = (meta_gradient(self.f, self.w, *self.batches, alpha=alpha, variant=v)[0] for v in ("fo", "hf"))
        return (self.flat(fo) - self.flat(hf)) / alpha, self.flat(fo)


def test_the_hessian_is_the_whole_matrix_times_the_vector() -> None:
    small, alpha = Small(), 0.1
    w, (D, D1, D2) = small.flat(small.w), small.batches
    product, v = small.hessian_term(alpha)
    torch.testing.assert_close(v, small.flat_gradient(w - alpha * small.flat_gradient(w, D), D1))
    H = torch.autograd.functional.hessian(lambda w: small.flat_f(w, D2), w)
    torch.testing.assert_close(product, H @ v)


def test_the_hessian_is_the_papers_difference_of_gradients() -> None:
    small, delta = Small(), 1e-5
    w, D2 = small.flat(small.w), small.batches[2]
    product, v = small.hessian_term(alpha=0.1)
    difference = (small.flat_gradient(w + delta * v, D2) - small.flat_gradient(w - delta * v, D2)) / (2 * delta)
    assert (product - difference).norm() < 1e-6 * product.norm()


def test_with_one_batch_for_all_it_is_the_gradient_of_the_adapted_loss() -> None:
    """`hf` is the derivative of F(w) = f(w - alpha grad f(w)), and `fo` is not."""
    small, alpha = Small(), 0.3
    D = small.batches[0]
    w = small.flat(small.w).requires_grad_()
    (inner,) = torch.autograd.grad(small.flat_f(w, D), w, create_graph=True)
    (expected,) = torch.autograd.grad(small.flat_f(w - alpha * inner, D), w)
    hf, _ = meta_gradient(small.f, small.w, D, D, D, alpha=alpha, variant="hf")
    fo, _ = meta_gradient(small.f, small.w, D, D, D, alpha=alpha, variant="fo")
    torch.testing.assert_close(small.flat(hf), expected)
    assert (small.flat(fo) - expected).norm() > 0.01 * expected.norm()


def test_the_step_is_taken_from_w_and_not_from_u(toy: Toy) -> None:
    w = start(PerFedAvg(), toy).server
    upload = update(PerFedAvg(alpha=0.2, beta=0.1, local_steps=1, batch_size=EVERYTHING), toy, w)
    u = moved(w, gradient(toy.task, w, toy.train[0]), -0.2)
    torch.testing.assert_close(upload, moved(w, gradient(toy.task, u, toy.train[0]), -0.1))


def test_the_three_batches_are_drawn_independently(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(f: object, w: Params, *triple: Data, **options: object) -> tuple[Params, float]:
        seen.append([batch.x for batch in triple])
        return w, 0.0

    monkeypatch.setattr(per_fedavg, "meta_gradient", spy)
    update(PerFedAvg(local_steps=6, batch_size=10), toy, start(PerFedAvg(), toy).server)
    assert len(seen) == 6
    for triple in seen:
        assert [len(x) for x in triple] == [10, 10, 10]
        sets = [{tuple(row) for row in x.tolist()} for x in triple]
        assert sets[0] != sets[1] != sets[2] != sets[0]


def test_a_client_predicts_after_one_step_of_its_own(toy: Toy) -> None:
    w, data, x = start(PerFedAvg(), toy).server, toy.train[1], toy.test[1].x
    u = moved(w, gradient(toy.task, w, data), -0.5)
    one, two = (PerFedAvg(alpha=0.5, personal_steps=s, batch_size=EVERYTHING) for s in (1, 2))
    expected = torch.softmax(loaded(toy.task, u)(x), dim=-1).detach()[None]
    torch.testing.assert_close(predict(one, toy.task, w, None, data, x), expected)
    uu = moved(u, gradient(toy.task, u, data), -0.5)
    expected = torch.softmax(loaded(toy.task, uu)(x), dim=-1).detach()[None]
    torch.testing.assert_close(predict(two, toy.task, w, None, data, x), expected)


def test_without_a_step_a_client_predicts_with_the_global_network(toy: Toy) -> None:
    w, data, x = start(PerFedAvg(), toy).server, toy.train[1], toy.test[1].x
    expected = predict(FedAvg(), toy.task, w, None, data, x)
    assert torch.equal(predict(PerFedAvg(personal_steps=0), toy.task, w, None, data, x), expected)
    assert not torch.equal(predict(PerFedAvg(), toy.task, w, None, data, x), expected)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_after_a_client_predicted_the_global_network_is_what_it_was(toy: Toy, steps: int) -> None:
    w = start(PerFedAvg(), toy).server
    before = trees.tree_map(torch.clone, w)
    algorithm = PerFedAvg(alpha=0.5, personal_steps=steps)
    personal = algorithm.personalise(toy.task, w, None, toy.train[0], generator(0))
    algorithm.predict(toy.task, personal, toy.test[0].x, generator(0))
    assert trees.equal(w, before)
    assert trees.equal(personal.W, w) == (steps == 0)
    assert all(personal.W[name].data_ptr() != p.data_ptr() for name, p in w.items())


def test_clients_weigh_by_their_examples(toy: Toy) -> None:
    w = start(PerFedAvg(), toy).server
    updates = [
        Update(client_id=k, num_examples=n, upload={name: torch.full_like(p, c) for name, p in w.items()})
        for k, (n, c) in enumerate([(30, 1.0), (10, 5.0)])
    ]
    mean = PerFedAvg().server_aggregate(toy.task, w, updates, generator(0))
    assert all(bool((p == 2.0).all()) for p in mean.values())


def test_one_step_helps_more_from_a_network_trained_for_it(toy: Toy) -> None:
    """With steps that matter, the loss after adaptation is below FedAvg's after the same adaptation."""
    alpha, rounds = 0.5, range(15)
    meta = PerFedAvg(variant="hf", alpha=alpha, beta=0.1, local_steps=5, batch_size=EVERYTHING)
    begin = start(meta, toy)
    plain = FedAvg(lr=0.1, local_steps=5, batch_size=EVERYTHING)

    def adapted_loss(run: ToyRun) -> float:
        each = [(predict(meta, toy.task, run.server, None, d, d.x)[0].log(), d.y) for d in toy.train.values()]
        return torch.stack([nnf.nll_loss(log_p, y) for log_p, y in each]).mean().item()

    assert adapted_loss(play(meta, toy, begin, rounds)) < adapted_loss(play(plain, toy, begin, rounds)) - 0.01


def test_the_toy_is_learned_with_the_hessian(toy: Toy) -> None:
    algorithm = PerFedAvg(variant="hf")
    begin = start(algorithm, toy)
    end = play(algorithm, toy, begin, range(8))
    assert accuracy(algorithm, toy, end) > accuracy(algorithm, toy, begin) + 0.15


CLIENTS = {"one example": [2], "two examples": [2, 0], "one class": [1] * 40, "fewer than a batch": [0, 1, 1, 3, 0]}


@both
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_small_client_takes_real_steps(toy: Toy, variant: Variant, kind: str) -> None:
    """No empty batch, whose loss would be nan and whose step nothing."""
    data, w = blobs(torch.tensor(CLIENTS[kind]), kind), start(PerFedAvg(), toy).server
    upload, _, info = PerFedAvg(variant=variant).client_update(toy.task, w, None, data, generator(0))
    assert trees.fault(upload, w) is None and not trees.equal(upload, w)
    assert math.isfinite(info["loss"])
    before, after = (nnf.cross_entropy(loaded(toy.task, p)(data.x), data.y).item() for p in (w, upload))
    assert after < before


@both
def test_the_label_prior_is_in_every_gradient(toy: Toy, variant: Variant) -> None:
    """With logits shifted by a constant of the client, as if by a bias that is not trained."""
    data, task = toy.train[2], toy.task._replace(label_prior=2.0)
    shift = ((torch.bincount(data.y, minlength=CLASSES) + 0.5) / (len(data.y) + 2)).log()
    w = start(PerFedAvg(), toy).server
    algorithm = PerFedAvg(variant=variant, alpha=0.3, beta=0.3, local_steps=2, batch_size=EVERYTHING)
    shifted = {name: p + shift if name == "fc2.bias" else p for name, p in w.items()}
    expected, _, _ = algorithm.client_update(toy.task, shifted, None, data, generator(0))
    got, _, _ = algorithm.client_update(task, w, None, data, generator(0))
    expected["fc2.bias"] = expected["fc2.bias"] - shift
    torch.testing.assert_close(got, expected)
    x = toy.test[2].x
    torch.testing.assert_close(
        predict(algorithm, task, w, None, data, x), predict(algorithm, toy.task, shifted, None, data, x)
    )


class Attention(nn.Module):
    """A network that torch runs through a kernel which has no second derivative; one of its layers is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)
        self.head, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x[:, None] * torch.ones(3, 1)).mean(1))
        return logits


def test_the_hessian_reaches_through_attention(toy: Toy) -> None:
    task, algorithm = Task(model=Attention(), num_classes=CLASSES), PerFedAvg(variant="hf")
    w = algorithm.init_server(task, generator(0))
    upload, _, _ = algorithm.client_update(task, w, None, toy.train[0], generator(0))
    assert trees.fault(upload, w) is None
    assert torch.equal(upload["unused.weight"], w["unused.weight"])
    assert not torch.equal(upload["encoder.self_attn.in_proj_weight"], w["encoder.self_attn.in_proj_weight"])
