"""The clients' mean by hand."""

import torch

from lrbpfl import trees
from lrbpfl.algorithms import average
from lrbpfl.algorithms.protocol import Update


def update(k: int, n: int, rows: list[list[float]], b: list[float]) -> Update:
    return Update(client_id=k, num_examples=n, upload={"a": torch.tensor(rows), "b": torch.tensor(b)})


def test_the_mean_is_that_of_the_clients_by_their_data() -> None:
    W = {"a": torch.zeros(2, 2), "b": torch.zeros(2)}
    updates = [update(0, 1, [[4.0, 0.0], [0.0, 8.0]], [4.0, 0.0]), update(1, 3, [[0.0, 4.0], [0.0, 0.0]], [0.0, 8.0])]
    mean = average.mean(W, updates)
    torch.testing.assert_close(mean, {"a": torch.tensor([[1.0, 3.0], [0.0, 2.0]]), "b": torch.tensor([1.0, 6.0])})


def test_a_row_is_averaged_by_how_far_each_client_moved_it() -> None:
    """Row 0: moves of length 3 and 1, data 1 and 3, so half each; row 1: one client alone; row 2: nobody.

    The parameter that is not named keeps the plain mean.
    """
    W = {"a": torch.tensor([[1.0, 1.0], [2.0, 2.0], [5.0, 5.0]]), "b": torch.tensor([0.0, 0.0])}
    before = trees.tree_map(torch.clone, W)
    updates = [
        update(0, 1, [[4.0, 1.0], [2.0, 10.0], [5.0, 5.0]], [4.0, 0.0]),
        update(1, 3, [[1.0, 2.0], [2.0, 2.0], [5.0, 5.0]], [0.0, 8.0]),
    ]
    mean = average.mean(W, iter(updates), rows=["a"])
    torch.testing.assert_close(mean["a"], torch.tensor([[2.5, 1.5], [2.0, 10.0], [5.0, 5.0]]))
    torch.testing.assert_close(mean["b"], torch.tensor([1.0, 6.0]))
    biases = average.mean(W, updates, rows=["b"])["b"]
    torch.testing.assert_close(biases, torch.tensor([4.0, 8.0]))
    assert trees.equal(W, before)


def test_nobody_counts_for_more_by_moving_a_row_out_of_all_proportion() -> None:
    """Four move a row by 1 and one by 1000: it counts ten times as much as each of them, not a thousand times.

    Where the median is small, a row may move as far as W's longest, here 2, and count for it.
    """
    W = {"a": torch.zeros(2, 2), "b": torch.zeros(2)}
    updates = [update(k, 1, [[1.0, 0.0], [0.0, 0.0]], [0.0, 0.0]) for k in range(4)]
    far = update(4, 1, [[1000.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
    found = average.mean(W, [*updates, far], rows=["a"])["a"][0, 0]
    torch.testing.assert_close(found, torch.tensor((4 * 1 + 10 * 1000) / 14))
    long = {"a": torch.tensor([[0.0, 0.0], [2.0, 0.0]]), "b": torch.zeros(2)}
    still = [update(k, 1, [[0.0, 0.001], [2.0, 0.0]], [0.0, 0.0]) for k in range(4)]
    holder = update(4, 1, [[0.0, 1.5], [2.0, 0.0]], [0.0, 0.0])
    found = average.mean(long, [*still, holder], rows=["a"])["a"][0, 1]
    torch.testing.assert_close(found, torch.tensor((4 * 0.001**2 + 1.5**2) / (4 * 0.001 + 1.5)))
