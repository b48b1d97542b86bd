"""The same federation on one machine, which has the data of all sites."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lrbpfl import trees
from lrbpfl.data.order import natural_order
from lrbpfl.engines.loop import Reply, Round, federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData
from lrbpfl.experiments.build import cohort_of
from lrbpfl.sites.holdings import hold, settings_of, setup_of
from lrbpfl.sites.hub import _public
from lrbpfl.sites.job import parse
from lrbpfl.states import Memory
from lrbpfl.trees import Tree

Present = Mapping[int, Collection[int]]  # who trains in a round; the first is 1


class Absent(Serial):
    """A serial engine in which some clients are not there in some rounds."""

    present: Present | None = None  # None: everybody, always

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        here = messages.keys() if self.present is None else self.present.get(t + 1, ())
        for k, message in messages.items():
            if k in here:
                yield from super().update({k: message}, t)
            else:
                yield Reply.failed(k, "absent")


def alone(
    job: dict[str, Any], sites: Mapping[str, Path], present: Mapping[int, Collection[int]] | None = None
) -> Round:
    """The last round; only the clients that are `present` in a round train in it."""
    found = parse(job)
    holdings = [hold(name, found, *settings_of(root)) for name, root in sites.items()]
    everybody = natural_order(client for holding in holdings for client in holding.rows)
    clients: dict[int, ClientData] = {}
    for holding in holdings:
        ids = {client: everybody.index(client) for client in holding.rows}
        setup = setup_of(found, holding, ids, len(everybody))
        clients |= {k: setup.clients[k] for k in ids.values()}
    if found.about.public:
        setup = setup._replace(task=setup.task._replace(public=_public(found)))
    engine = Absent(setup._replace(clients=tuple(clients[k] for k in sorted(clients))), Memory())
    engine.present = present
    asked = found.config.federation
    cohort = cohort_of(asked, len(everybody))
    return list(federate(engine, rounds=asked.rounds, cohort=cohort, evaluate_every=asked.rounds))[-1]


def network(last: Round) -> dict[str, Any]:
    """What the server has."""
    return dict(trees.named_leaves(last.server))
