"""The page: one self-contained HTML text, rendered from a build's files and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from portable_coreml.judge.limits import expected_on, listed, taking

from shardmill.files import flattened
from shardmill.forms.recipe import called, costliest
from shardmill.report import wording
from shardmill.report.gates import gate_questions
from shardmill.report.points import front_plot, front_steps, judged, measured_points
from shardmill.report.read import Build, Json, PartRow
from shardmill.report.residency import STATUS, device_sections, placement
from shardmill.report.speed import close_calls, measured_speed, noisy, plots, speed_groups
from shardmill.report.stages import STATES, step_states
from shardmill.report.verdict import verdict

FILTERS = {  # name in the templates -> function in wording.py
    "engine": "engine_text",
    "fixed": "fixed",
    "margin": "margin",
    "marked": "marked",
    "number": "number",
    "percent": "percent",
    "plural": "plural",
    "sentence": "sentence",
    "short": "short",
    "size": "file_size",
    "threshold": "threshold_text",
}


@cache
def environment() -> Environment:
    """Return the templates of this package; all values are escaped, and a missing name is an error."""
    made = Environment(
        loader=PackageLoader("shardmill.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(wording, function) for name, function in FILTERS.items()}
    return made


def render(build: Build) -> str:
    """Return report.html."""
    return filled(context(build))


def filled(shown: dict[str, Any]) -> str:
    """Return the page, given the result of `context`.

    This is separate from `render`, so that a figure can be taken from the same context.
    """
    return environment().get_template("page.html").render(shown)


def context(build: Build) -> dict[str, Any]:
    """Return the values that the templates show."""
    asked = gate_questions(build)
    return {
        "model": build.model,
        "plan": build.plan,
        "weights": _weighed(build),
        "verdict": verdict(build, asked),
        "questions": asked,
        "engines": sorted({wording.engine_text(identity) for identity in _engines(build)}),
        "steps": tuple(step_states(build).values()),
        "states": STATES,
        "pieces": build.pieces,
        "passes": build.plan["passes"],
        "lengths": build.plan.get("lengths", []),
        "worth": _worth(build.plan["passes"]),
        "limit": build.plan["weight_file_limit"],
        "systems": listed(build.plan["systems"]),
        "expected": {p.name: expected_on(p.weight_file or 0, build.plan["systems"]) for p in build.pieces},
        "left": _left(build),
        "state_bytes": {piece.name: _state_bytes(piece, build) for piece in build.pieces},
        "placement": placement(build.placed),
        "devices": device_sections(build.devices, build.residency),
        "stale": build.stale,
        "statuses": STATUS,
        "speed": build.speed,
        "close_calls": partial(close_calls, margin=build.turned),
        "origin": _origin(build),
        "encodes": build.encodes,
        "search": build.search,
        "on_apple": _on_apple(build),
        "predicted": build.predicted,
        "predicts": bool(build.settings.get("predict")),
        **(_search_rows(build.search, build.points) if build.search else {}),
        **({"types": _label_types(build.model["labels"])} if build.encodes else {}),
        **(_decoding(build.speed) if build.speed and not build.encodes else {}),
    }


def _left(build: Build) -> str:
    """Return the systems on which some program is expected on the CPU because of its size; "" if there are none."""
    systems = build.plan["systems"]
    taken = taking(max(p.weight_file or 0 for p in build.pieces if p.kind != "embedding"), systems)
    return listed(system for system in systems if system not in taken) if len(taken) < len(systems) else ""


def _search_rows(search: Json, measured: Mapping[str, Json]) -> dict[str, Any]:
    """Return the values that the templates show about a search and the measurements of its points."""
    points = measured_points(measured)
    return {
        "front": front_plot(search, points),
        "front_steps": front_steps(search),
        "costliest": costliest(search),
        "points": points,
        "judgement": judged(points) if points else (),
    }


def _weighed(build: Build) -> dict[str, Any]:
    """Return the name of the weights' form, and of the weights that a pass reads the bits per weight and the bytes."""
    apart = {row["name"] for row in build.plan["parts"] if row.get("drafter")}
    programs = [p for p in build.pieces if p.kind not in ("embedding", "labels") and p.name not in apart]
    read = programs[: len(programs) // len(build.plan["buckets"])] if build.encodes else programs  # of a single bucket
    size, count = sum(piece.weight_file or 0 for piece in read), sum(piece.parameters for piece in read)
    return {"called": called(build.settings["convert"]), "bits": 8 * size / count, "bytes": size}


def _worth(passes: Sequence[Json]) -> dict[int, float]:
    """Return, by the tokens of a pass, the bytes that routing saves for each additional program that it calls.

    If the Neural Engine takes longer to read these bytes than to start a program, routing is the faster form.
    """
    dense, routed = ({p["tokens"]: p for p in passes if p["experts"] == form} for form in ("dense", "routed"))
    savings = {}
    for tokens in dense.keys() & routed.keys():
        saved = dense[tokens]["bytes"] - routed[tokens]["bytes"]
        if saved > 0:
            savings[tokens] = saved / (routed[tokens]["dispatches"] - dense[tokens]["dispatches"])
    return dict(sorted(savings.items()))


def _decoding(speed: Json) -> dict[str, Any]:
    """Return the values that the templates show about a decoder's benchmark."""
    return {
        "sweep": speed_groups(speed["sweep"]),
        "tasks": speed_groups(speed["tasks"]),
        "metered": any(row["mj_per_token"] is not None for row in measured_speed(speed)),
        "noisy": noisy(speed),
        "plots": plots(speed),
    }


def _label_types(labels: Sequence[str]) -> list[str]:
    """Return the types that an encoder distinguishes: its labels without their prefixes and without `O`."""
    return list(dict.fromkeys(label.split("-", 1)[-1] for label in labels if label != "O"))


def _origin(build: Build) -> dict[str, Any]:
    """Return the place and the files of the checkpoint, and the packages, tools, receipts and settings of the build."""
    commit = build.source["commit"]
    tools: dict[str, set[str]] = {}
    for receipt in build.receipts.values():
        for name, version in receipt["packages"].items():
            tools.setdefault(name, set()).add(version)
    return {
        "place": build.source["repo"] or build.settings["source"]["path"] or "not recorded",
        "commit": "local folder, no commit" if commit == "local" else commit,
        "files": sorted(build.source["files"].items()),
        "packages": [(p.name, _package_hash(build, p.name)) for p in build.pieces if p.kind != "embedding"],
        "tools": [(name, ", ".join(sorted(versions))) for name, versions in sorted(tools.items())],  # steps may differ
        "receipts": sorted(build.receipts.items()),
        "settings": flattened(build.settings),
    }


def _package_hash(build: Build, part: str) -> str:
    """Return the hash of a part's package from its receipt; empty if there is no receipt."""
    receipt = build.receipts.get(f"packages/{part}", {"outputs": {}})
    return str(receipt["outputs"].get("package", ""))


def _state_bytes(piece: PartRow, build: Build) -> int:
    """Return the bytes of a part's states, or of its caches on the host, both in fp16; 0 for a head."""
    (row,) = (row for row in build.plan["parts"] if row["name"] == piece.name)
    shapes = [*row.get("states", {}).values(), *(row["inputs"][name] for name in row.get("written", {}))]
    return sum(2 * prod(shape) for shape in shapes)


def _on_apple(build: Build) -> bool:
    """Return whether Core ML has run a program of this build, here or on a device that was measured."""
    benchmark = [build.speed["engine"]] if build.speed else []
    here = any(engine["name"] == "coreml" for engine in (*_engines(build), *benchmark))
    return here or any(device.is_measured for device in build.devices)


def _engines(build: Build) -> Iterator[Mapping[str, Any]]:
    """Yield every engine that computed numbers for the gates."""
    yield from (file["engine"] for file in (*build.parity, *build.residency))
    yield from (file["witness"] for file in build.witness)
