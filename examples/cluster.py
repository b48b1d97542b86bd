"""The same federation in this process and on a Ray cluster: the same bits. About half a minute (extra `ray`).

Without a cluster Ray starts one of this machine's own; with `address="auto"` it uses the one this machine belongs to.
"""

import numpy as np
import torch

import lrbpfl


def site(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A hundred examples of three classes."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (100,), generator=rng)
    return torch.randn(100, 10, generator=rng) + y[:, None] + 0.2 * seed, y


def main(rounds: int = 5, engines: tuple[str, ...] = ("serial", "ray")) -> None:
    """Train once in each engine, and compare what the first site's model says."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    sites = {f"site-{k}": site(k) for k in range(6)}
    said = []
    for engine in engines:
        with lrbpfl.Federation(model, sites, seed=0, engine=engine, workers=2) as federation:
            federation.fit(rounds)
            said.append(federation.personal("site-0").predict(site(0)[0]).probability)
            print(engine, f"NLL {federation.scores['site-0']['nll']:.6f}")
    print("the same bits:", all(np.array_equal(said[0], other) for other in said))


if __name__ == "__main__":
    main()
