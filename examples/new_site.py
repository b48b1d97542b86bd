"""A site that took no part gets a model from its own data, of more and more of it; nothing is sent. Some seconds."""

import tempfile

import numpy as np
import torch

import lrbpfl


def site(turn: float, seed: int, n: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """Three clouds of points on a circle that every site sees turned."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=rng)
    angle = 2.1 * y + turn
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + torch.randn(n, 2, generator=rng), y


def main(rounds: int = 20) -> None:
    """Train with four sites; a fifth one comes with 10, 30 and 120 examples."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    sites = {f"site-{k}": site(0.3 * k, seed=k) for k in range(4)}
    x, y = (part.numpy() for part in site(0.9, seed=10, n=500))
    with tempfile.TemporaryDirectory() as folder:
        with lrbpfl.Federation(model, sites, seed=0) as federation:
            federation.fit(rounds, directory=f"{folder}/run")
        for n in (10, 30, 120):
            newcomer = lrbpfl.onboard(f"{folder}/run", *site(0.9, seed=4, n=n), model=model, name="site-4")
            p = newcomer.predict(x).probability
            nll = -np.log(p[np.arange(len(y)), y]).mean()
            print(f"{n:4d} examples: accuracy {(p.argmax(1) == y).mean():.2f}, NLL {nll:.3f}")


if __name__ == "__main__":
    main()
