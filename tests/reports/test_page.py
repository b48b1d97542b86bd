"""The page in a real browser: it opens from the disk, works, and shows names as text."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Page

from lrbpfl.reports.collect import collect
from lrbpfl.reports.page import render
from tests.reports.conftest import Open, write_run

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '"><img src="https://example.invalid/x.png" onerror="window.hacked = 1">',
    "<!-- <script> & ' \u2028 {{ 7 * 7 }}",
)


def write_page(paths: Sequence[Path], file: Path) -> Path:
    file.write_text(render(collect(paths)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LR-BPFL with ranks, and FedAvg."""
    folder = tmp_path_factory.mktemp("both")
    first = write_run(folder / "one", algorithm="lr-bpfl", clients=12, layers=("conv1.weight", "fc.weight"))
    return write_page([first, write_run(folder / "two", clients=12)], folder / "page.html")


def heading(page: Page, name: str) -> None:
    page.get_by_role("columnheader", name=name).get_by_role("button").click()


def column(page: Page, place: int) -> list[str]:
    return page.locator(f"#client-table tbody tr > :nth-child({place})").all_inner_texts()


def test_every_figure_is_drawn_and_described(both: Path, opened: Open) -> None:
    page = opened(both)
    plots = page.locator(".plot").all()
    assert len(plots) == 4 + 4 + 5 + 1  # scatter and curves, reliability, one client, rank map
    for plot in plots:
        assert plot.locator("svg").get_attribute("aria-label")
        assert plot.locator("svg title").count() > 0
    assert page.locator("figure").count() == page.locator("figcaption").count()


def test_the_summary_shows_the_recorded_numbers(both: Path, opened: Open) -> None:
    recorded = json.loads((both.parent / "two" / "summary.json").read_text())["fedavg"]
    row = opened(both).locator("#summary tbody tr").nth(1).inner_text().split()
    eces = ("ece_pooled", "ece_pooled_floor", "ece_pooled_debiased", "ece_pooled_low", "ece_pooled_high", "ece_mean",
            "ece_floor_mean", "ece_worst", "ece_floor_worst")  # fmt: skip
    in_percent = [f"{100 * recorded[key]:.2f}" for key in ("accuracy", *eces)]
    plain = [f"{recorded[key]:.3f}" for key in ("nll", "brier")]
    assert [word for word in row if word != "to"] == ["fedavg", in_percent[0], *plain, *in_percent[1:], "3.0", "12.5"]


def test_headings_sort_by_mouse_and_by_key(both: Path, opened: Open) -> None:
    page = opened(both)
    heading(page, "accuracy")
    falling = [float(shown) for shown in column(page, 3)]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) > 3
    page.keyboard.press("Enter")  # the heading keeps the focus
    assert [float(shown) for shown in column(page, 3)] == sorted(falling)
    heading(page, "client")
    assert column(page, 1) == [f"client {k}" for k in range(12)]  # 2 before 10


def test_a_row_and_the_list_pick_a_client(both: Path, opened: Open) -> None:
    page = opened(both)
    page.locator("#client-table tbody tr", has_text="client 7").click()
    assert page.locator("#pick-client").input_value() == "7"
    assert "client 7:" in page.locator("#client-scores").inner_text()
    assert page.locator("#client-ranks title").all_text_contents() == [
        "conv1: 2 of 3 gates open",
        "fc: 2 of 3 gates open",
    ]
    page.locator("#pick-client").select_option(label="client 2")
    assert page.locator("#client-table .picked").get_attribute("data-client") == "2"
    page.locator("#pick-client").select_option(label="all clients together")
    assert "All clients:" in page.locator("#client-scores").inner_text()
    counted = page.locator("#client-confusion title").all_text_contents()
    assert sum(int(words.split(": ")[1].split(" of ")[0]) for words in counted) == 12 * 60
    page.locator("#pick-run").select_option(label="fedavg")
    assert "carry no masks" in page.locator("#client-ranks").inner_text()


def test_the_rank_map_shows_open_gates_and_picks(both: Path, opened: Open) -> None:
    page = opened(both)
    words = page.locator("#rank-maps title").all_text_contents()
    assert [words[k] for k in (0, 2, 4)] == [f"client {k}, conv1: rank {1 + k} of 3" for k in range(3)]
    page.locator("#rank-maps .clickable text").nth(10).click()
    assert page.locator("#pick-client").input_value() == "5"


@pytest.fixture(scope="module")
def newcomers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with new clients of two alphas each, and one without."""
    folder = tmp_path_factory.mktemp("newcomers")
    first = write_run(folder / "one", algorithm="lr-bpfl", new=(0.1, 1.0), layers=("fc.weight",))
    second = write_run(folder / "two", new=(0.1, 0.5), clients=5)
    return write_page([first, second, write_run(folder / "three", algorithm="local")], folder / "page.html")


def test_new_clients_have_a_table_of_the_recorded_numbers(newcomers: Path, opened: Open) -> None:
    page = opened(newcomers)
    groups = page.locator("#new-clients tbody").all()
    words = [row.inner_text().split() for group in groups for row in group.locator("tr").all()]
    assert [row[0] for row in words] == ["training", "fedavg", "0.1", "fedavg", "0.5", "1"]
    recorded = json.loads((newcomers.parent / "two" / "summary.json").read_text())["fedavg"]
    for row, own in (
        (words[1][1:], recorded),
        (words[3][1:], recorded["new"]["0.1"]),
        (words[4][2:], recorded["new"]["0.5"]),
    ):
        eces = [f"{100 * own[key]:.2f}" for key in ("ece_pooled", "ece_pooled_floor", "ece_worst", "ece_floor_worst")]
        assert row == [f"{100 * own['accuracy']:.2f}", f"{own['nll']:.3f}", *eces]
    assert page.locator("#new-clients .best").count() == 0  # the runs have other clients
    page.locator("nav a", has_text="New clients").click()


def test_new_clients_are_drawn_over_alpha(newcomers: Path, opened: Open) -> None:
    page = opened(newcomers)
    recorded = json.loads((newcomers.parent / "two" / "summary.json").read_text())["fedavg"]
    for place, key, floor in (
        ("#new-ece", "ece_pooled", "ece_pooled_floor"),
        ("#new-worst", "ece_worst", "ece_floor_worst"),
    ):
        words = page.locator(f"{place} title").all_text_contents()
        parts = {"training clients": recorded} | {f"new clients, alpha {a}": recorded["new"][a] for a in ("0.1", "0.5")}
        assert [line for line in words if line.startswith("fedavg")] == [
            f"fedavg, {who}: {100 * own[key]:.2f} %, floor {100 * own[floor]:.2f} %" for who, own in parts.items()
        ]
        assert not [line for line in words if line.startswith("local")]
        ticks = page.locator(f"{place} svg > text").all_text_contents()
        assert ticks[-6:-2] == ["training", "0.1", "0.5", "1"]
    assert page.locator("#new-legend").inner_text().split() == ["lr-bpfl", "fedavg"]


def test_new_clients_can_be_picked_and_are_marked(newcomers: Path, opened: Open) -> None:
    page = opened(newcomers)
    options = page.locator("#pick-client option").all_text_contents()
    marked = [
        "client 3 (new, alpha 0.1)",
        "client 4 (new, alpha 0.1)",
        "client 5 (new, alpha 1)",
        "client 6 (new, alpha 1)",
    ]
    assert options == ["all training clients together", *(f"client {k}" for k in range(3)), *marked]
    heading(page, "new, alpha")
    assert column(page, 2) == ["1", "1", "0.1", "0.1", "", "", ""]
    page.locator("#client-table tbody tr", has_text="client 4").click()
    assert "client 4 (new, alpha 0.1): accuracy" in page.locator("#client-scores").inner_text()
    assert page.locator("#client-ranks title").all_text_contents() == ["fc: 2 of 3 gates open"]
    page.locator("#pick-client").select_option(label="all training clients together")
    assert "All training clients: accuracy" in page.locator("#client-scores").inner_text()
    counted = page.locator("#client-confusion title").all_text_contents()
    assert sum(int(words.split(": ")[1].split(" of ")[0]) for words in counted) == 3 * 60
    assert page.locator("#rank-maps title").count() == 3  # of those that trained
    page.locator("#pick-run").select_option(label="local")
    assert page.locator("#client-table th", has_text="alpha").count() == 0


def test_a_page_without_new_clients_does_not_speak_of_them(both: Path, opened: Open) -> None:
    page = opened(both)
    assert page.locator("#new-clients").count() == 0
    assert "new" not in page.locator("body").inner_text().lower().split()
    assert page.locator("#pick-client option").first.inner_text() == "all clients together"


ANIMALS = ("cat", "<b>dog", "a hamster with an extraordinarily long name", "owl")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_confusion_matrix_names_the_classes(tmp_path: Path, opened: Open, width: int) -> None:
    page = opened(write_page([write_run(tmp_path / "run", class_names=ANIMALS)], tmp_path / "page.html"), width=width)
    page.locator("#pick-client").select_option(label="all clients together")
    matrix = page.locator("#client-confusion")
    rows, columns = (matrix.locator("svg > text").all()[start:8:2] for start in (0, 1))
    for labels in (rows, columns):
        shown = [label.evaluate("label => label.firstChild.data") for label in labels]
        assert shown[:2] + shown[3:] == ["cat", "<b>dog", "owl"]
        assert shown[2].startswith("a ham") and shown[2].endswith("…")
        assert labels[2].locator("title").text_content() == ANIMALS[2]
        assert labels[0].locator("title").count() == 0
    titles = matrix.locator("g title").all_text_contents()
    assert titles[0].startswith("class cat taken for cat: ")
    assert any(f"class owl taken for {ANIMALS[2]}: " in title for title in titles)
    frame = matrix.locator("svg").bounding_box()
    for label in [*rows, *columns]:
        box = label.bounding_box()
        assert frame and box and frame["x"] <= box["x"] and box["y"] + box["height"] <= frame["y"] + frame["height"]
    assert page.locator("#client b").count() == 0


def test_many_classes_have_numbers_on_the_axes_and_names_in_words(tmp_path: Path, opened: Open) -> None:
    names = [f"kind {k}" for k in range(20)]
    run = write_run(tmp_path / "run", classes=20, examples=400, class_names=names)
    matrix = opened(write_page([run], tmp_path / "page.html")).locator("#client-confusion")
    assert matrix.locator("svg > text").first.evaluate("label => label.firstChild.data") == "0"
    assert "class 0 (kind 0) taken for 0 (kind 0): " in matrix.locator("g title").all_text_contents()[0]


def test_classes_without_names_are_numbers(both: Path, opened: Open) -> None:
    titles = opened(both).locator("#client-confusion title").all_text_contents()
    assert titles[0].startswith("class 0 taken for 0: ")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways(tmp_path: Path, opened: Open, width: int) -> None:
    long = [f"site-{'very-' * 30}{k}" for k in range(30)]
    paths = [tmp_path / (letter * 200) for letter in "ab"]
    for path in paths:
        alphas = (0.1, 0.25, 0.5, 0.75, 1.0)
        write_run(path, algorithm="lr-bpfl", clients=30, classes=30, names=long, layers=["fc.weight"], new=alphas)
    page = opened(write_page(paths, tmp_path / "page.html"), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.getBoundingClientRect().right") <= width


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_dark_follows_the_system_and_the_switch(both: Path, opened: Open) -> None:
    light, dark = (opened(both, color_scheme=scheme) for scheme in ("light", "dark"))
    colours = background(light), background(dark)
    assert colours[0] != colours[1]
    for page, other in ((light, colours[1]), (dark, colours[0])):
        page.locator("#theme").click()
        assert background(page) == other
    light.emulate_media(media="print")  # on paper it is light, whatever the switch says
    assert light.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"


def test_hostile_names_are_text(tmp_path: Path, opened: Open) -> None:
    paths = [tmp_path / "<b onclick=alert(1)>x", tmp_path / "<i>y"]
    for path in paths:
        write_run(path, names=HOSTILE)
    page = opened(write_page(paths, tmp_path / "page.html"))
    assert page.evaluate("window.hacked") is None
    assert sorted(page.locator("#client-table tbody th").all_text_contents()) == sorted(HOSTILE)
    assert page.locator("#pick-client option").all_text_contents()[1:] == list(HOSTILE)
    assert page.locator("b, i, img, #client script").count() == 0
    assert "fedavg (<i>y)" in page.locator("#summary tbody").inner_text()


def test_what_is_missing_leaves_a_sentence(tmp_path: Path, opened: Open) -> None:
    path = write_run(tmp_path / "run")
    (path / "predictions.safetensors").unlink()
    (path / "metrics.jsonl").unlink()
    (path / "summary.json").write_text('{"fedavg": {"seconds": 1.5}}')
    page = opened(write_page([path], tmp_path / "page.html"))
    assert "No round was judged." in page.locator("#learning").inner_text()
    assert "were not kept" in page.locator("#reliability").inner_text()
    assert "–" in page.locator("#summary tbody").inner_text()


def test_the_best_are_bold_on_their_own_clients(tmp_path: Path, opened: Open) -> None:
    skills = {"lr-bpfl": 6.0, "fedavg": 6.0, "local": 1.0}
    paths = [write_run(tmp_path / a, algorithm=a, clients=12, skill=s, new=(0.1,)) for a, s in skills.items()]
    page = opened(write_page(paths, tmp_path / "page.html"))

    def bold(rows: str) -> list[list[str]]:
        return [row.locator(".best").all_inner_texts() for row in page.locator(rows).all()]

    (own,) = json.loads((paths[0] / "summary.json").read_text()).values()
    first, second, third = bold("#summary tbody tr")
    means = [f"{100 * own['accuracy']:.2f}", f"{own['nll']:.3f}", f"{own['brier']:.3f}"]
    assert first == second == means  # runs that predict the same share it
    assert not set(means) & set(third)
    assert "Bold: the best, and all" in page.locator("#summary").inner_text()
    assert bold("#new-clients tbody:nth-of-type(1) tr")[0] == means[:2]
    assert bold("#new-clients tbody:nth-of-type(2) tr")[2] == []


def test_other_conditions_are_told(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(seed), federation={"seed": seed}) for seed in (0, 1)]
    assert "<code>federation.seed</code>" in render(collect(paths))
    assert "not made under the same conditions" not in render(collect(paths[:1]))


def test_five_hundred_clients_open_at_once(tmp_path: Path, opened: Open) -> None:
    layers = [f"conv{i}.weight" for i in range(6)]
    path = write_run(tmp_path / "run", algorithm="lr-bpfl", clients=500, classes=10, examples=100, layers=layers)
    file = write_page([path], tmp_path / "page.html")
    assert file.stat().st_size < 6e6 / 4  # room for four such runs side by side
    drawn = "performance.getEntriesByName('all figures')[0].startTime"
    assert min(opened(file).evaluate(drawn) for _ in range(3)) < 2000
