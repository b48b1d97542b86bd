"""A configuration: the same from a file, the command line and Python, and refused in one sentence."""

import dataclasses
import tomllib
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import Config, make_algorithm, override, parse, read, to_toml
from lrbpfl.studies.comparison import plan
from tests.experiments.conftest import Configure


def refusal(tables: dict[str, Any]) -> str:
    """What is said about tables that are wrong: one line."""
    with pytest.raises(BadInput) as caught:
        parse(tables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_a_whole_configuration() -> None:
    config = parse({})
    assert (config.data.dataset, config.federation.rounds, config.engine.kind) == ("speakers", 30, "processes")
    assert (config.algorithm_name, config.algorithm) == ("lr-bpfl", LRBPFL())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_survives_the_way_through_toml(name: str) -> None:
    config = parse({"algorithm": {"name": name}, "data": {"partition": "dirichlet"}, "federation": {"seed": 2**63}})
    assert parse(tomllib.loads(to_toml(config.tables()))) == config


def test_toml_spells_out_every_default() -> None:
    tables = tomllib.loads(to_toml(parse({}).tables()))
    assert set(tables) == {"data", "federation", "engine", "algorithm"}
    assert set(tables["algorithm"]) == {"name", *(field.name for field in dataclasses.fields(LRBPFL))}
    assert "partition" not in tables["data"]  # None has no spelling in TOML, and is what a missing key means


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(1e-300, 1e300)


@settings(max_examples=100, deadline=None)
@given(dataset=TEXT, alpha=NUMBERS, seed=st.integers(0, 2**70), balanced=st.booleans())
def test_any_value_survives_the_way_through_toml(dataset: str, alpha: float, seed: int, balanced: bool) -> None:
    data = {"dataset": dataset, "alpha": alpha, "balanced": balanced}
    config = parse({"data": data, "federation": {"seed": seed}})
    assert parse(tomllib.loads(to_toml(config.tables()))) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40", 40),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("false", False),
        ("digits", "digits"),
        ('"40"', "40"),
        ("'a b'", "a b"),
        ("a folder/with spaces", "a folder/with spaces"),
        ("a=b", "a=b"),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ("", ""),
        (" 7 ", 7),
        (" x ", "x"),
        ("lr-bpfl:paper", "lr-bpfl:paper"),
        ("True", "True"),
        ("[1,", "[1,"),
    ],
)
def test_a_setting_is_read_as_toml_or_else_as_a_string(text: str, value: object) -> None:
    found = override({}, [f"section.key={text}"])["section"]["key"]
    assert (found, type(found)) == (value, type(value))


def test_settings_lie_on_top_of_the_file_and_the_last_one_wins() -> None:
    tables = {"federation": {"rounds": 3, "cohort": 2}}
    settings = ["federation.rounds=4", " algorithm.name = fedavg", "federation.rounds=5"]
    assert override(tables, settings) == {"federation": {"rounds": 5, "cohort": 2}, "algorithm": {"name": "fedavg"}}
    assert tables == {"federation": {"rounds": 3, "cohort": 2}}


def test_a_setting_may_reach_into_a_table_inside_a_section() -> None:
    tables = {"algorithm": {"fedavg": {"lr": 0.5}}}
    found = override(tables, ["algorithm.fedavg.local_steps=3", "algorithm.lr-bpfl.samples=1"])
    assert found == {"algorithm": {"fedavg": {"lr": 0.5, "local_steps": 3}, "lr-bpfl": {"samples": 1}}}
    assert tables == {"algorithm": {"fedavg": {"lr": 0.5}}}


@pytest.mark.parametrize("setting", ["", "rounds=3", "federation.rounds", "federation.=3", ".rounds=3", "=", "a.b"])
def test_a_setting_of_another_form_is_refused(setting: str) -> None:
    with pytest.raises(BadInput) as caught:
        override({}, [setting])
    assert str(caught.value).startswith(f"--set {setting!r} is not of the form section.key=value")


@pytest.mark.parametrize(
    ("tables", "word", "near"),
    [
        ({"federaton": {}}, "section 'federaton'", "federation"),
        ({"federation": {"round": 3}}, "key of federation 'round'", "rounds"),
        ({"data": {"label_per_client": 3}}, "key of data 'label_per_client'", "labels_per_client"),
        ({"engine": {"worker": 3}}, "key of engine 'worker'", "workers"),
        ({"algorithm": {"max_rnk": 3}}, "key of algorithm 'max_rnk'", "max_rank"),
        ({"algorithm": {"name": "fedavg", "local_step": 3}}, "key of algorithm 'local_step'", "local_steps"),
        ({"algorithm": {"name": "lrbpfl"}}, "algorithm 'lrbpfl'", "lr-bpfl"),
        ({"algorithm": {"name": "lr-bpfl:papr"}}, "preset of lr-bpfl 'papr'", "paper"),
        ({"data": {"partition": "lables"}}, "partition 'lables'", "labels"),
        ({"federation": {"model": "cn"}}, "model 'cn'", "cnn"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all_others(
    tables: dict[str, Any], word: str, near: str
) -> None:
    said = refusal(tables)
    assert said.startswith(f"unknown {word} (did you mean {near!r}?); known: ")
    assert near in said.partition("known: ")[2].split(", ")


def test_a_name_that_resembles_nothing_still_lists_what_there_is() -> None:
    said = refusal({"algorithm": {"name": "xyzzy"}})
    assert "did you mean" not in said
    assert said.endswith(f"known: {', '.join(ALGORITHMS)}")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("federation", "rounds", "ten"),
        ("federation", "rounds", "ten\nlines"),
        ("federation", "rounds", 1.5),
        ("federation", "rounds", 2.0),
        ("federation", "rounds", True),
        ("federation", "rounds", 0),
        ("federation", "rounds", -4),
        ("federation", "rounds", {"a": 1}),
        ("federation", "rounds", [3]),
        ("federation", "cohort", 0),
        ("federation", "seed", -1),
        ("federation", "evaluate_every", -1),
        ("federation", "evaluate_on", "train"),
        ("federation", "schedule", "linear"),
        ("federation", "label_prior", -0.5),
        ("federation", "label_prior", nan),
        ("federation", "model", 3),
        ("data", "dataset", 3),
        ("data", "clients", 0),
        ("data", "clients", -2),
        ("data", "labels_per_client", 0),
        ("data", "balanced", 1),
        ("data", "balanced", "yes"),
        ("data", "train_fraction", 0.0),
        ("data", "train_fraction", 1.0),
        ("data", "train_fraction", -0.1),
        ("data", "train_fraction", nan),
        ("data", "train_fraction", "half"),
        ("data", "calibration_fraction", 1.0),
        ("data", "stratified", 1),
        ("data", "shift", "labels"),
        ("data", "shift_strength", -0.5),
        ("data", "concept_groups", 1),
        ("data", "validation_fraction", 1.0),
        ("data", "validation_fraction", -0.1),
        ("data", "alpha", nan),
        ("data", "alpha", inf),
        ("data", "alpha", 0.0),
        ("data", "alpha", -1.0),
        ("data", "skew", -inf),
        ("data", "skew", -1.0),
        ("engine", "workers", -1),
        ("engine", "workers", "all"),
        ("engine", "kind", "threads"),
        ("engine", "device", 0),
        ("algorithm", "max_rank", 0),
        ("algorithm", "max_rank", 1.5),
        ("algorithm", "class_rows", 1),
        ("algorithm", "ranks", "adaptive"),
        ("algorithm", "calibration", 1.5),
        ("algorithm", "prior_variance", 0.0),
        ("algorithm", "model_lr", nan),
        ("algorithm", "model_lr", inf),
        ("algorithm", "model_lr", -0.1),
        ("algorithm", "model_lr", True),
        ("algorithm", "update", "jointly"),
    ],
)
def test_a_bad_value_is_named_with_its_section_and_key(section: str, key: str, value: object) -> None:
    assert refusal({section: {key: value}}).startswith(f"{section}.{key} = {value!r}: ")


def test_a_whole_number_will_do_for_a_fraction() -> None:
    algorithm = parse({"algorithm": {"model_lr": 1}}).algorithm
    assert isinstance(algorithm, LRBPFL)
    assert isinstance(algorithm.model_lr, float)


@pytest.mark.parametrize("section", ["data", "federation", "engine", "algorithm"])
@pytest.mark.parametrize("value", [3, "fedavg", [1], None, True])
def test_a_section_given_as_a_value_is_refused(section: str, value: object) -> None:
    assert refusal({section: value}) == f"{section} is a section with keys, not the value {value!r}"
    with pytest.raises(BadInput, match=f"{section} is a section"):
        override({section: value}, [f"{section}.key=1"])


def test_validation_needs_something_to_validate_on() -> None:
    assert "data.validation_fraction" in refusal({"federation": {"evaluate_on": "validation"}})
    parse({"federation": {"evaluate_on": "validation"}, "data": {"validation_fraction": 0.2}})


@pytest.mark.parametrize("text", ["[data", "rounds = ", "a = 1\na = 2", "= 3", "[data]\n[data]"])
def test_broken_toml_is_refused_by_the_name_of_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} cannot be read as TOML: ")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"[data]\ndataset = '\xff'")
    with pytest.raises(BadInput, match="cannot be read as TOML"):
        read(path)


def test_a_file_that_is_not_there_and_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no configuration file .*nowhere\.toml"):
        read(tmp_path / "nowhere.toml")
    with pytest.raises(BadInput, match="cannot be read as TOML"):
        read(tmp_path)


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[federation]\nrounds = 7\n[algorithm]\nname = 'fedavg'\nlr = 0.5\n")
    config = parse(override(read(path), ["algorithm.lr=0.25"]))
    assert config.federation.rounds == 7
    assert config.algorithm == ALGORITHMS["fedavg"](**{"lr": 0.25})


def test_the_preset_is_the_paper_and_explicit_fields_win() -> None:
    paper = make_algorithm("lr-bpfl:paper", {})
    assert paper == LRBPFL(**LRBPFL.PRESETS["paper"])
    assert paper != LRBPFL()
    assert isinstance(paper, LRBPFL)
    assert (paper.max_rank, paper.samples, paper.mask_steps, paper.model_steps) == (8, 4, 20, 1)
    mixed = parse({"algorithm": {"name": "lr-bpfl:paper", "max_rank": 3}}).algorithm
    assert mixed == dataclasses.replace(paper, max_rank=3)


def test_the_preset_stays_in_the_record() -> None:
    config = parse({"algorithm": {"name": "lr-bpfl:paper", "max_rank": 3}})
    assert parse(tomllib.loads(to_toml(config.tables()))) == config
    assert config.tables()["algorithm"]["name"] == "lr-bpfl:paper"


def identity(**sections: dict[str, Any]) -> dict[str, Any]:
    return parse(sections).identity()


def test_what_computes_is_no_part_of_the_identity() -> None:
    assert identity(engine={"kind": "serial", "workers": 3}) == identity()
    assert "engine" not in identity()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("federation", "rounds", 21),
        ("federation", "seed", 1),
        ("federation", "schedule", "cosine"),
        ("federation", "precision", "bf16"),
        ("data", "clients", 11),
        ("algorithm", "model_lr", 0.1),
    ],
)
def test_whatever_changes_a_number_changes_the_identity(section: str, key: str, value: object) -> None:
    assert identity(**{section: {key: value}}) != identity()


def test_several_threads_change_the_identity_and_need_an_engine_that_has_them() -> None:
    serial = {"kind": "serial"}
    assert identity(federation={"threads": 2}, engine=serial) != identity() == identity(federation={"threads": 1})
    with pytest.raises(BadInput, match=r"federation\.threads = 2 needs engine\.kind = 'serial'"):
        parse({"federation": {"threads": 2}})


def test_a_configuration_cannot_be_changed() -> None:
    config: Config = parse({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.algorithm_name = "fedavg"  # type: ignore[misc] # that mypy refuses it too is the point
    with pytest.raises(ValueError, match="frozen"):
        config.federation.rounds = 3


@pytest.mark.parametrize(("given", "alphas"), [(0.5, (0.5,)), (1, (1.0,)), ([0.1, 1], (0.1, 1.0)), ((2.0,), (2.0,))])
def test_one_alpha_stands_for_a_list_of_one(given: Any, alphas: tuple[float, ...]) -> None:
    config = parse({"data": {"new_clients": 3, "new_alpha": given}})
    assert config.data.new_alpha == alphas
    assert parse(tomllib.loads(to_toml(config.tables()))) == config


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"new_alpha": [0.1, 0.5, 0.1]}, "data.new_alpha = [0.1, 0.5, 0.1] names a value twice"),
        ({"new_alpha": [0.1, -1.0]}, "data.new_alpha = -1.0: input should be greater than 0"),
        ({"new_alpha": []}, "data.new_alpha = "),
        ({"new_alpha": "small"}, "data.new_alpha = 'small'"),
        ({"new_clients": -1}, "data.new_clients = -1"),
        ({"new_clients": True}, "data.new_clients = True"),
        ({"new_fraction": 1.0}, "data.new_fraction = 1.0"),
        ({"corruptions": 1}, "data.corruptions = 1"),
    ],
)
def test_what_cannot_be_asked_of_new_clients_is_told(data: dict[str, Any], words: str) -> None:
    assert words in refusal({"data": data})


def test_keys_of_another_shift_are_not_written_down() -> None:
    keys = {"shift", "shift_strength", "concept_groups"}

    def written(shift: str) -> set[str]:
        data = {"shift": shift, "shift_strength": 0.3, "concept_groups": 4}
        return keys & set(parse({"data": data}).tables()["data"])

    assert written("none") == set()
    assert written("features") == keys - {"concept_groups"}
    assert written("concept") == keys - {"shift_strength"}


def test_how_parts_are_drawn_is_written_down() -> None:
    """A missing train_fraction stays missing: what it means depends on data and partition, which are written down."""
    assert parse({}).tables()["data"]["stratified"] is True
    assert "train_fraction" not in parse({}).tables()["data"]
    assert identity(data={"stratified": False}) != identity() != identity(data={"train_fraction": 0.1})
    assert identity(data={"calibration_fraction": 0.1}) != identity()


def test_what_is_off_is_not_written_down() -> None:
    """So that runs from before these keys keep their configuration to the letter."""
    keys = {"corruptions", "new_clients", "new_alpha", "new_fraction"}
    assert not keys & set(parse({}).tables()["data"])
    assert not keys & set(parse({"data": {"new_alpha": 3.0, "new_fraction": 0.5}}).tables()["data"])
    assert parse({"data": {"new_clients": 2, "corruptions": True}}).tables()["data"].keys() >= keys - {"new_fraction"}
    assert not {"schedule", "precision", "threads"} & set(parse({}).tables()["federation"])
    assert parse({"federation": {"schedule": "cosine"}}).tables()["federation"]["schedule"] == "cosine"


@pytest.mark.parametrize(
    ("name", "public_fraction", "label_prior"),
    [("lr-bpfl", 0.0, 1.0), ("lr-bpfl:paper", 0.0, 0.0), ("fedavg", 0.0, 0.0), ("fedbe", 0.04, 0.0)],
)
def test_an_algorithm_gets_what_it_asks_of_the_task(name: str, public_fraction: float, label_prior: float) -> None:
    config = parse({"algorithm": {"name": name}})
    assert (config.data.public_fraction, config.federation.label_prior) == (public_fraction, label_prior)
    said = {"data": {"public_fraction": 0.5}, "federation": {"label_prior": 0.25}, "algorithm": {"name": name}}
    config = parse(said)
    assert (config.data.public_fraction, config.federation.label_prior) == (0.5, 0.25)


def test_what_one_asks_for_everybody_in_a_comparison_gets() -> None:
    configs = plan({}, ["fedavg", "lr-bpfl", "fedbe"])
    assert {(c.data.public_fraction, c.federation.label_prior) for c in configs.values()} == {(0.04, 1.0)}
    configs = plan({"algorithm": {"lr-bpfl": {"label_prior": 0.25}}}, ["fedavg", "lr-bpfl", "lr-bpfl:paper"])
    assert {c.federation.label_prior for c in configs.values()} == {0.25}
    configs = plan({"federation": {"label_prior": 0.0}}, ["fedavg", "lr-bpfl"])
    assert {(c.data.public_fraction, c.federation.label_prior) for c in configs.values()} == {(0.0, 0.0)}


def test_fields_of_an_algorithm_in_a_comparison_are_a_section() -> None:
    with pytest.raises(BadInput, match=r"algorithm\.fedavg is a section with keys, not the value 3"):
        plan({"algorithm": {"fedavg": 3}}, ["fedavg", "local"])


def test_who_is_told_to_do_without_public_inputs_does_not_get_any(configure: Configure) -> None:
    with pytest.raises(BadInput, match="unlabelled inputs at the server"):
        build_setup(configure(data={"public_fraction": 0.0}, algorithm={"name": "fedbe"}))
