"""A binary tree over classes: every inner node tells two groups of classes apart, every leaf is a class.

A tree is one tensor (nodes, classes): +1 for classes on the left of a node, -1 on its right, 0 for the others.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor


def build(embeddings: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """The tree over the classes in y (n,), from the top; classes with similar mean embeddings part last.

    c classes make c - 1 nodes: none for a single class.
    """
    means = {c: embeddings[y == c].mean(0) for c in y.unique().tolist()}
    sides, groups = [], [list(means)]
    while groups:
        group = groups.pop()
        if len(group) > 1:
            left = _left(torch.stack([means[c] for c in group]))
            parts = [[c for c, here in zip(group, left, strict=True) if here == side] for side in (True, False)]
            sides.append(torch.zeros(num_classes, dtype=torch.int8))
            sides[-1][parts[0]], sides[-1][parts[1]] = 1, -1
            groups.extend(reversed(parts))
    return (torch.stack(sides) if sides else torch.zeros(0, num_classes, dtype=torch.int8)).to(y.device)


def class_probabilities(sides: Tensor, left: Iterable[Tensor], seen: Tensor) -> Tensor:
    """The product of the branches along the path to every class, (..., classes).

    From the probability (...) of the left side at every node; `seen` (..., classes) is 1 for the classes of the tree
    and 0 for the others.
    """
    probs = seen
    for side, p in zip(sides, left, strict=True):
        p = p[..., None]
        probs = probs * torch.where(side == 0, torch.ones_like(p), torch.where(side > 0, p, 1 - p))
    return probs


def _left(means: Tensor) -> list[bool]:
    """Which of the classes go left: one of two clusters of their means (c, d), the one that holds the first class.

    Of two classes the first goes left, and so does the first half of classes that cannot be told apart.
    """
    if len(means) > 2:
        from sklearn.cluster import KMeans

        with warnings.catch_warnings():  # equal means: one cluster is empty
            warnings.simplefilter("ignore")
            clusters = KMeans(n_clusters=2, n_init=50, random_state=42).fit_predict(means.cpu().numpy()).tolist()
        if len(set(clusters)) == 2:
            return [cluster == clusters[0] for cluster in clusters]
    return [i < (len(means) + 1) // 2 for i in range(len(means))]
