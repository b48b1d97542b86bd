"""Trees over classes: by hand, and what holds for every tree."""

import pytest
import torch
from torch import Tensor

from lrbpfl.core import class_tree
from lrbpfl.rng import generator


def line(*places: float, classes: list[int] | None = None, num_classes: int = 5) -> Tensor:
    """The tree of classes whose examples lie around these places."""
    y = torch.tensor(classes or range(len(places))).repeat(2)
    x = torch.tensor(places).repeat(2) + torch.tensor([0.01, -0.01]).repeat_interleave(len(places))
    return class_tree.build(x[:, None].double(), y, num_classes)


def random_tree(classes: int, *path: int) -> Tensor:
    x = torch.randn(3 * classes, 4, dtype=torch.float64, generator=generator(0, "tree", *path))
    return class_tree.build(x, torch.arange(3 * classes) % classes, classes)


def test_classes_are_parted_by_their_means() -> None:
    assert line(0.0, 9.0, 1.0, 7.5, num_classes=5).tolist() == [
        [1, -1, 1, -1, 0],
        [1, 0, -1, 0, 0],
        [0, 1, 0, -1, 0],
    ]


def test_a_cluster_of_one_is_a_leaf() -> None:
    assert line(0.0, 50.0, 1.0, num_classes=3).tolist() == [[1, -1, 1], [1, 0, -1]]


def test_two_classes_are_one_node_and_one_class_is_none() -> None:
    assert line(3.0, 1.0, classes=[4, 2]).tolist() == [[0, 0, 1, 0, -1]]
    assert line(3.0, classes=[2]).shape == (0, 5)


@pytest.mark.parametrize("classes", [3, 4, 5])
def test_classes_that_cannot_be_told_apart_are_halved(classes: int) -> None:
    tree = line(*[2.0] * classes)
    assert len(tree) == classes - 1
    assert tree[0].tolist()[:classes] == [1] * ((classes + 1) // 2) + [-1] * (classes // 2)


@pytest.mark.parametrize("classes", [2, 3, 7, 20])
def test_every_two_classes_part_at_exactly_one_node(classes: int) -> None:
    tree = random_tree(classes, classes).int()
    assert tree.shape == (classes - 1, classes)
    parted = (tree[:, :, None] * tree[:, None, :] == -1).sum(0)
    assert torch.equal(parted, 1 - torch.eye(classes, dtype=torch.int64))
    assert bool((tree[0] != 0).all())


def test_the_product_along_the_path_by_hand() -> None:
    tree = torch.tensor([[1, -1, 1, 0], [1, 0, -1, 0]])
    seen = torch.tensor([1.0, 1.0, 1.0, 0.0])
    probs = class_tree.class_probabilities(
        tree, [torch.tensor([0.7, 1.0]), torch.tensor([0.4, 0.0])], seen.expand(2, 4)
    )
    torch.testing.assert_close(probs, torch.tensor([[0.28, 0.3, 0.42, 0.0], [0.0, 0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("classes", [1, 2, 3, 7, 20])
def test_probabilities_sum_to_one_whatever_the_tree_and_the_branches(classes: int) -> None:
    tree = random_tree(classes, classes)
    left = torch.rand(classes - 1, 3, 6, dtype=torch.float64, generator=generator(0, "left"))
    probs = class_tree.class_probabilities(tree, left, torch.ones(3, 6, classes).double())
    assert probs.shape == (3, 6, classes) and bool((probs >= 0).all())
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 6).double())
