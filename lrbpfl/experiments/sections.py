"""The sections of a configuration: what each key takes, and what it means in the comment above or behind it."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from lrbpfl.core.descent import Schedule
from lrbpfl.core.precision import Precision
from lrbpfl.engines.intake import FARTHEST, Aggregate
from lrbpfl.engines.launch import Start

COHORT = 5  # clients a round where nobody says how many
MOST = 10**7  # of anything that is counted
Count = Annotated[int, Field(ge=1, le=MOST)]
Groups = Annotated[int, Field(ge=2, le=MOST)]
Seed = Annotated[int, Field(ge=0, le=2**256)]
# One value stands for a list of one.
Several = BeforeValidator(lambda given: tuple(given) if isinstance(given, list | tuple) else (given,))
Alphas = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1), Several]
# Names that are numbers need no quotes.
Names = Annotated[tuple[Annotated[str, BeforeValidator(lambda n: str(n) if type(n) is int else n)], ...], Several]


class Section(BaseModel):
    """A section of a configuration: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def idle(self) -> set[str]:
        """Keys of what is switched off: they are not written down, and change no number."""
        return set()


class DataSection(Section):
    """Which data, and who gets what."""

    # speakers, digits, cifar10, cifar100, or a path: of a .csv or .parquet file with a client column, of a folder of
    # client-name.npz (.csv, .parquet) files, or of a folder of images client/class/name.png. If there are more than
    # 1,000 .npz files, or 1 GiB, clients are loaded when they are needed, unless a key takes all data at once.
    dataset: str = "speakers"
    client_column: str | None = None  # of a table: whose a row is; None: client
    label_column: str | None = None  # of a table: what is to be told; None: label
    # Features are brought to mean 0 and standard deviation 1, as they have them in training parts. client: each
    # client's own; pooled: those of all training clients together, from their sums.
    standardise: Literal["no", "client", "pooled"] = "no"
    partition: str | None = None  # labels, dirichlet, size, natural; None: natural if the data have clients, or labels
    clients: Count = 10  # K, among whom examples are dealt out; a natural partition brings its own
    labels_per_client: Count = 2  # of the partition by labels
    balanced: bool = True  # in the partition by labels, a class is shared equally among its clients
    # Of the Dirichlet partition: of each class's shares over the clients, so that every example is dealt exactly once.
    # The paper draws each client's class probabilities, which need not add up to the examples there are.
    alpha: Annotated[float, Field(gt=0)] = 0.1
    skew: Annotated[float, Field(ge=0)] = 1.0  # of the sizes in the partition by size; 0: equal
    # Of a client's examples. None: the data's own split, if they have one and the partition is natural; without one,
    # 0.7 in a natural partition and 0.1 in any other.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the training part
    # Of what is left for training: kept from it for good, to calibrate on. None: what the task asks for.
    calibration_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    # Of what is left for training then: moved to the server, without labels. None: as much as the algorithm asks for.
    public_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    stratified: bool = True  # each part of a client's examples has that client's class proportions
    # What makes clients differ beyond who gets what. features: every client's inputs are scaled and moved in a way of
    # its own; concept: groups of clients call the classes differently.
    shift: Literal["none", "features", "concept"] = "none"
    # s of features: x exp(N(0, s^2)) + u N(0, s^2) for each feature, u the power of ten nearest to a feature's spread;
    # of uint8 images: contrast times exp(N(0, s^2)), and brightness and turns of 64 s levels and 30 s degrees.
    shift_strength: Annotated[float, Field(ge=0)] = 0.5
    concept_groups: Groups = 2  # client k is in group k mod this; group 0 keeps its labels
    corruptions: bool = False  # every client's images are spoilt in a way of its own
    # So many for each of new_alpha, or of a natural partition's own; they never train and are judged at the end.
    new_clients: Annotated[int, Field(ge=0, le=MOST)] = 0
    new_sites: Names = ()  # the same for clients of a natural partition, by their names
    new_alpha: Alphas = (0.1,)  # of the Dirichlet partitions of what is held out for new clients
    # What is held out for them, of every class. None: the official test set, or a fifth where there is none.
    new_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    def idle(self) -> set[str]:
        """Keys of what is switched off."""
        shift = {"none": {"shift", "shift_strength", "concept_groups"}}
        shift |= {"features": {"concept_groups"}, "concept": {"shift_strength"}}
        off = {key for key in ("corruptions", "calibration_fraction", "new_sites") if not getattr(self, key)}
        off |= {"standardise"} if self.standardise == "no" else set()
        new = set() if self.new_clients else {"new_clients", "new_alpha", "new_fraction"}
        return shift[self.shift] | off | new


class FederationSection(Section):
    """Who trains when, and what is judged."""

    rounds: Count = 30  # T, in each of which some clients train
    cohort: Count | None = None  # clients a round, tau K; None: 5, or all if there are fewer
    schedule: Schedule = "constant"  # of the shared network's rate over the rounds; cosine: falling to 0
    seed: Seed = 0  # of all that is random: who gets what, where training starts, every draw
    evaluate_every: Annotated[int, Field(ge=0, le=MOST)] = 10  # rounds; 0: after the last one only
    judged: Count | None = None  # clients that are then judged, always the same ones, drawn by the seed; None: all
    judged_last: Count | None = None  # the same after the last round, where each also gets a file with its own model
    evaluate_on: Literal["test", "validation"] = "test"  # the part of each client's examples that judges its model
    model: str = "auto"  # cnn (the paper's), mlp, resnet; auto: cnn for images of at least 16 x 16 pixels, else mlp
    # Examples, shared out among all classes, that smooth a client's class frequencies, which then join the likelihood;
    # 0: they do not. None: what the algorithm asks for.
    label_prior: Annotated[float, Field(ge=0)] | None = None
    # After training: probabilities p^(1/T), with T fitted on what clients kept from training, for each of them or for
    # all together.
    temper: Literal["no", "client", "all"] = "no"
    coverage: Annotated[float, Field(gt=0, lt=1)] | None = None  # promised of each client's sets; None: no sets
    confidence: Annotated[float, Field(gt=0, lt=1)] | None = None  # that a client's own part keeps it; None: on average
    # Of convolutions and matrix products where networks learn. bf16: steps of the paper's CNN are about 1.5 times as
    # fast on a CPU that multiplies in bfloat16, those of small networks are not; parameters, losses, optimisers
    # and predictions stay float32.
    precision: Precision = "float32"
    # Of a client while it learns; more than one: sums come in another order, so in other bits than one thread's, and
    # only in the serial engine, where clients do not share the cores.
    threads: Count = 1
    # An upload is refused if it moved more than so many times the median move of its round and farther than its message
    # is long, or one of its tensors likewise; 0: none is, nor where there is noise.
    farthest: Annotated[float, Field(ge=0)] = FARTHEST
    # Of what clients move: their mean, as the algorithm weighs them; trimmed, median: by coordinates, all count alike.
    aggregate: Aggregate = "mean"
    trim: Annotated[float, Field(gt=0, lt=0.5)] = 0.2  # of the trimmed mean: at least this share is cut off at each end
    clip: Annotated[float, Field(gt=0)] | None = None  # length to which a client's move is shortened; None: it is not
    noise: Annotated[float, Field(ge=0)] = 0.0  # on the sum of clipped moves, its std as a multiple of clip; 0: none
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # at which the epsilon of that noise is told

    def idle(self) -> set[str]:
        """Keys of what is switched off."""
        off = {"schedule": self.schedule == "constant", "temper": self.temper == "no"}
        off |= {"farthest": self.farthest == FARTHEST, "aggregate": self.aggregate == "mean"}
        off |= {"trim": self.aggregate != "trimmed", "noise": not self.noise, "delta": not self.noise}
        off |= {"precision": self.precision == "float32", "threads": self.threads == 1}
        return {key for key, is_off in off.items() if is_off}


class EngineSection(Section):
    """How it is computed; nothing here changes a number."""

    # processes, serial (all in this process), ray (clients as tasks of a Ray cluster; extra ray), or what another
    # installed package offers under lrbpfl.engines.
    kind: str = "processes"
    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # 0: one for each core, here or of the cluster at the address
    device: str = "cpu"  # where clients compute, in torch's words
    checkpoint_every: Count = 1  # rounds between moments that a cut run can go on from
    start: Start = "auto"  # of worker processes; auto: fork on Linux where clients run on the CPU, or spawn
    # Seconds that a worker may take over a client before it is ended and the client run again; 0: 20 times the longest
    # that another took, at least a minute, and an hour before any was done; twice as long each time it is run again.
    deadline: Annotated[float, Field(ge=0)] = 0.0
    # Of a Ray cluster that is there already: host:port, or auto for the one this machine belongs to; empty: one of this
    # machine's own, for the time of the run.
    address: str = ""

    def idle(self) -> set[str]:
        """Keys of what is switched off."""
        return set() if self.address else {"address"}
