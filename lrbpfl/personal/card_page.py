"""A card as Markdown, with the front matter that Hugging Face reads."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

FEW = 12  # classes and layers that are named one by one
SCORES = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood (nats)",
    "brier": "Brier score (0 to 2)",
    "mce": "largest calibration error of a bin (MCE)",
    "total": "mean total uncertainty (nats)",
    "aleatoric": "of it aleatoric",
    "epistemic": "of it epistemic",
}
INDEXED = {"accuracy": "accuracy", "ece": "expected calibration error", "nll": "negative log-likelihood"}


def markdown(card: Mapping[str, Any]) -> str:
    """The card as a page."""
    name = _plain(card["client"]) or "a client"
    lines = [
        *_front(card),
        "",
        f"# The model of {name}",
        "",
        *_what(card),
        "",
        "## How good it is",
        "",
        *_quality(card),
        "",
        "## What it holds of its client's data",
        "",
        *_held(card),
        "",
        "## Where it comes from",
        "",
        *_origin(card),
    ]
    return "\n".join(lines) + "\n"


def _front(card: Mapping[str, Any]) -> Iterator[str]:
    """YAML whose values are JSON, which YAML is a superset of: no name can break out of it."""
    tags = ["federated-learning", "personalised", "calibration", _line(card["algorithm"].get("name"))]
    yield "---"
    yield "library_name: lrbpfl"
    yield f"tags: {json.dumps(tags)}"
    if card["scores"] and card["evaluated"]:
        yield f"metrics: {json.dumps([key for key in INDEXED if key in card['scores']])}"
        yield f"model-index: {json.dumps([_index(card)], ensure_ascii=False)}"
    yield "---"


def _index(card: Mapping[str, Any]) -> dict[str, Any]:
    image = isinstance(card["inputs"], dict) and len(card["inputs"].get("shape", ())) == 3
    name = _line(card["client"])
    part = f"{_line(card['evaluated'].get('on'))} part of {name}"
    metrics = [
        {"type": key, "name": name, "value": card["scores"][key]}
        for key, name in INDEXED.items()
        if key in card["scores"]
    ]
    task = {"type": "image-classification" if image else "other"}
    dataset = {"type": "private", "name": part}
    return {"name": name, "results": [{"task": task, "dataset": dataset, "metrics": metrics}]}


def _what(card: Mapping[str, Any]) -> Iterator[str]:
    algorithm, network = card["algorithm"].get("name"), card["model"].get("name")
    own = "a network of its owner's" if network is None else f"the network `{_plain(network)}`"
    examples = None if card["training_examples"] is None else _plain(card["training_examples"])
    yield f"A classifier made by `{_plain(algorithm)}` with {own}, for one client of a federation and nobody else."
    yield ""
    yield f"- trained on: {'not said' if examples is None else f'{examples} examples of its own'}"
    yield f"- classes: {_classes(card['classes'])}"
    yield f"- inputs: {_inputs(card['inputs'])}"
    prior, temperature = card["label_prior"], card["temperature"]
    yield f"- label prior: {'none' if prior is None else f'{prior:g} (predictions lean on its own class frequencies)'}"
    yield f"- temperature: {'none' if temperature is None else f'{temperature:.3g}, fitted after training'}"
    if card["ranks"]:
        yield f"- rank of its mask, by layer: {_ranks(card['ranks'])}"


def _quality(card: Mapping[str, Any]) -> Iterator[str]:
    scores, judged = card["scores"], card["evaluated"]
    if not scores:
        yield "Not evaluated: the file holds no scores."
        return
    on, examples = (judged or {}).get("on"), (judged or {}).get("examples")
    part = f"its own {_plain(on)} part" if on else "a part that is not named"
    yield f"On {part}, {_plain(examples) if examples else 'an unknown number of'} examples it was not trained on:"
    yield ""
    yield "| score | value |"
    yield "|---|---|"
    for key, name in SCORES.items():
        if key == "mce":
            yield from _calibration(scores)
        if key in scores:
            yield f"| {name} | {scores[key]:.4f} |"
    yield from _sets(scores)


def _calibration(scores: Mapping[str, float]) -> Iterator[str]:
    """The ECE is never shown without the noise in it, if the file knows that."""
    if "ece" not in scores:
        return
    yield f"| expected calibration error (ECE, 15 bins) | {scores['ece']:.4f} |"
    if "ece_floor" in scores:
        yield f"| what a perfectly calibrated model would show by chance | {scores['ece_floor']:.4f} |"
    if "ece_low" in scores and "ece_high" in scores:
        yield f"| 95 % interval of the ECE on endless data | {scores['ece_low']:.4f} to {scores['ece_high']:.4f} |"
    if "ece_debiased" in scores:
        yield f"| ECE without its noise | {scores['ece_debiased']:.4f} |"


def _sets(scores: Mapping[str, float]) -> Iterator[str]:
    if "coverage" in scores:
        yield f"| prediction sets that hold the label | {scores['coverage']:.1%} |"
    if "set_size" in scores:
        yield f"| classes in a prediction set, mean | {scores['set_size']:.2f} |"


def _held(card: Mapping[str, Any]) -> Iterator[str]:
    if card["holds"] is None:
        yield "Not said. Take it for as private as the client's data."
        return
    yield from (f"- {_plain(sentence)}" for sentence in card["holds"][:FEW])
    yield "- Its scores if there are any, its classes and the number of its examples."
    yield ""
    yield "No noise was added for privacy: whoever has the file may learn something about the data it was made from."


def _origin(card: Mapping[str, Any]) -> Iterator[str]:
    own, shared, noise = card["own"], card["shared"], card["noise"]
    versions = ", ".join(f"{_plain(name)} {_plain(value)}" for name, value in card["versions"].items())
    address = "/".join(_plain(part) for part in noise["address"])
    yield f"- its own: {own['numbers']:,} numbers, {own['bytes']:,} bytes (file: {own['file_bytes']:,} bytes)"
    if shared:
        yield f"- shared with other clients: {shared['numbers']:,} numbers, {shared['bytes']:,} bytes"
    else:
        yield "- shared with other clients, in a file of its own: nothing"
    yield f"- noise of its predictions: seed {_plain(noise['seed'])}, address {address}"
    yield f"- made with: {versions or 'not said'}"
    yield f"- digest: `{card['digests']['own']}`"
    if card["digests"]["shared"]:
        yield f"- digest of what is shared: `{card['digests']['shared']}`"
    yield f"- fingerprint of its network: `{_plain(card['model'].get('fingerprint'))}`"


def _classes(classes: list[Any]) -> str:
    some = ", ".join(_plain(name) for name in classes[:FEW])
    return f"{len(classes)}: {some}{', ...' if len(classes) > FEW else ''}"


def _inputs(described: Any) -> str:
    if not isinstance(described, dict):
        return "not said"
    if isinstance(described.get("named"), dict):
        return "; ".join(f"{_plain(name)}: {_inputs(part)}" for name, part in described["named"].items())
    if isinstance(described.get("several"), list):
        return "; ".join(map(_inputs, described["several"]))
    return f"{_plain(described.get('dtype'))} ({', '.join(['n', *map(_plain, described.get('shape', ()))])})"


def _ranks(ranks: Mapping[str, Mapping[str, int]]) -> str:
    told = [f"{_plain(name)} {rank['rank']} of {rank['of']}" for name, rank in ranks.items()]
    return ", ".join(told[:FEW]) + (f", ... ({len(told)} layers)" if len(told) > FEW else "")


def _plain(value: Any) -> str:
    """A value from a file on one line, without signs that Markdown takes for its own."""
    return "".join(f"\\{sign}" if sign in "\\`*[]<>|#" else sign for sign in _line(value))


def _line(value: Any) -> str:
    """A value from a file on one line of bounded length, without signs that nobody sees."""
    return "".join(sign for sign in " ".join(str(value).split()) if sign.isprintable())[:200]
