"""The page says what the files say: numbers beside thresholds, gaps as gaps, and nothing can break out."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from evidence import results

from report import sample
from report.reading import elements, section, words
from shardmill.report.gates import gate_questions
from shardmill.report.page import environment, render
from shardmill.report.read import PartRow
from shardmill.report.speed import Plot, plots
from shardmill.report.stages import STATES

ALONE = '{% import "macros.html" as show with context %}{% include "SECTION" %}'  # as page.html does it
EVIL = "<script>alert('x')</script>\"&{{ 7 * 7 }}"


@pytest.fixture(scope="module", autouse=True)
def figures_drawn_once() -> Iterator[None]:
    """Keeps figures by what was measured, of which they are a function (test_speed.py): to draw them takes longest."""
    known: dict[str, list[Plot]] = {}

    def once(speed: dict[str, Any]) -> list[Plot]:
        measured = json.dumps(speed)
        if measured not in known:
            known[measured] = plots(speed)
        return known[measured]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.report.page.plots", once)
        yield


@pytest.fixture(scope="module")
def page(figures_drawn_once: None) -> str:
    return render(sample.build())


def test_every_element_is_closed(page: str) -> None:
    """Browsers mend broken HTML each in its own way."""
    assert elements(page).open == []


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    """No script, and no address that a browser would fetch."""
    for tag, attributes in elements(page).found:
        assert tag not in {"script", "iframe", "img", "object", "embed"}
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_ids_are_unique_and_every_reference_has_its_target(page: str) -> None:
    """Several drawings on one page must not take each other's markers."""
    ids = [attributes["id"] for _, attributes in elements(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert references and references <= set(ids)


def test_with_which_hint_programs_are_loaded_is_said_where_model_json_says_it(page: str) -> None:
    model = {**sample.build().model, "reshape_frequency": "frequent"}
    assert "loaded with reshapeFrequency frequent" in render(sample.build(model=model))
    assert "reshapeFrequency" not in page


def test_the_divergence_along_a_long_text_is_drawn_if_it_was_measured(page: str) -> None:
    along = [{"start": stop - 32, "stop": stop, "kl": 1e-3 * stop} for stop in (256, 512)]
    build = sample.build()
    files = tuple(file | ({"along": along} if file["part"] == "head_0" else {}) for file in build.parity)
    shown = render(sample.build(verdicts={**build.verdicts, "parity": files}))
    assert "KL divergence along a long text" in shown and "mean of 32 positions; no threshold limits" in shown
    assert "along a long text" not in page and elements(shown).open == []


def test_that_silu_comes_from_tanh_is_said_where_model_json_says_it(page: str) -> None:
    model = {**sample.build().model, "silu": "tanh"}
    assert "SiLU from tanh" in render(sample.build(model=model))
    assert "SiLU from" not in page


def test_weights_that_a_pass_leaves_out_are_not_what_it_reads(page: str) -> None:
    """The labels' rows of the LM head, and the programs of a drafter."""
    said, build = re.compile(r"[\d.]+ bits per weight; a pass reads [^;]*;"), sample.build()
    apart = [PartRow(kind, kind, 0, 16, 2, 98400, 2**30, 2**31) for kind in ("labels", "fuse")]
    plan = {**build.plan, "parts": [*build.plan["parts"], {"name": "labels"}, {"name": "fuse", "drafter": True}]}
    more = render(sample.build(pieces=(*build.pieces, *apart), plan=plan))
    assert said.findall(more) == said.findall(page) != []
    assert all(f">{piece.name}<" in more for piece in apart)


def test_two_renders_are_equal(page: str) -> None:
    """The page is an artifact: the same files, the same bytes."""
    assert render(sample.build()) == page


def test_no_date_is_on_the_page(page: str) -> None:
    """matplotlib dates its drawings unless told not to."""
    assert "<metadata>" not in page and "dc:date" not in page


def test_numbers_stand_beside_their_thresholds(page: str) -> None:
    gates = section(page, "gates")
    assert "2.5e-7 ≤ 1e-4 holds" in gates
    assert "43.25 ≥ 30 holds" in gates


def test_repeated_widths_are_folded_to_the_worst_and_listed_in_full(page: str) -> None:
    gates = section(page, "gates")
    assert "4.75e-6 ≤ 1e-5 holds 2.1 × under · worst of 6, in layers_00_02 (mixed)" in gates
    assert "layers_00_02 width_error 1.25e-7 ≤ 1e-5 holds T=2" in gates
    assert gates.count("1.25e-7") == 3  # once per part, in the full table only


def test_limits_of_a_model_s_own_are_shown_where_they_were_applied() -> None:
    """Each part has one, and the worst number is that which is nearest to its own."""
    build = sample.build()
    parts = [dict(file) for file in build.parity]
    for file, value, limit in zip(parts, (4e-6, 3e-7), ("<= 5e-06", "<= 3.1e-07"), strict=False):
        why = f"22 times what rounding moves {file['part']}"
        row = sample.number("width_error", value, limit, "2 widths", limit_why=why)
        file["gate"] = [*(row for row in file["gate"] if row["name"] != "width_error"), row]
    gates = section(render(replace(build, verdicts={**build.verdicts, "parity": tuple(parts[:2])})), "gates")
    assert f"3e-7 ≤ 3.1e-7 holds 1e-8 under · worst of 2, in {parts[1]['part']}" in gates
    assert f"22 times what rounding moves {parts[1]['part']}." in gates
    assert "width_error each its own limit" in gates and "4e-6 ≤ 5e-6" in gates


def test_predicted_is_said_and_never_called_resident(page: str) -> None:
    text = words(page)
    assert "Predicted, not measured: Neural Engine residency." in text
    assert "predicted to hold" in section(page, "gates")
    assert "could run there (predicted)" in section(page, "residency")
    assert "prefers it (measured)" not in text
    assert "is resident" not in text


def test_the_first_line_counts_gates_and_names_what_was_not_run(page: str) -> None:
    text = words(page)
    assert "All 22 gate numbers hold, 4 of them by prediction." in text
    assert "Not run: Neural Engine speed, energy per token." in text
    assert "snakemake --cores 4 all measures Neural Engine residency, Neural Engine speed: on a Mac" in text


def test_a_measure_that_nothing_reports_is_not_run_with_the_reason(page: str) -> None:
    """Core ML's fp16 measure has no place on an engine with fp32."""
    assert "not run ≤ 0.1 width_error answers the same question" in section(page, "gates")


@pytest.mark.parametrize(
    ("name", "convert", "experts"),
    [("codes_differ", {"calibration": {"text": "a"}}, None), ("experts_agreement", {}, {"count": 4})],
)
def test_a_measure_is_missed_only_where_it_means_something(
    name: str, convert: dict[str, Any], experts: dict[str, Any] | None
) -> None:
    """No Mac would measure codes that nobody chose, or experts that there are not."""
    assert name not in words(render(sample.build()))
    settings, plan = copy.deepcopy(sample.build().settings), copy.deepcopy(sample.build().plan)
    settings["convert"] |= convert
    plan["architecture"]["graph"]["experts"] = experts
    assert re.search(rf"not run {name} No gate file", words(render(sample.build(settings=settings, plan=plan))))


@pytest.mark.parametrize(
    ("kind", "experts", "name", "reason"),
    [
        ("encoder", None, "label_mismatches", "Core ML computes in fp16 only"),
        ("decoder", {"count": 4}, "experts_agreement", "Core ML computes in fp16 only"),
        ("decoder", {"count": 4}, "experts_agreement_fp16", "only the portable engine shows"),
        ("decoder", None, "not_chosen", "every program is so small"),
    ],
)
def test_what_is_not_measured_on_a_mac_has_a_reason(
    kind: str, experts: dict[str, Any] | None, name: str, reason: str
) -> None:
    plan = sample.plan() | {"kind": kind}
    plan["architecture"]["graph"]["experts"] = experts
    files, placed = (
        tuple(said(part) | {"engine": sample.COREML} for part in sample.PARTS)
        for said in (sample.parity, sample.residency)
    )
    build = sample.build(plan=plan, parity=files, residency=placed)
    (measure,) = (m for question in gate_questions(build) for m in question.measures if m.name == name)
    assert measure.worst is None and measure.reason.startswith(reason)


def test_what_a_gate_refused_is_not_run_with_its_reason() -> None:
    """On a Mac nothing computes in fp32; the page must not show the gap as 0 or as nothing."""
    files = []
    for part in (*sample.PARTS, "stack"):
        file = sample.parity(part)
        file["gate"] = [row for row in file["gate"] if row["name"] != "program_error"]
        files.append(file | {"engine": sample.COREML, "not_run": {"program_error": "Core ML has no fp32"}})
    html = render(sample.build(parity=tuple(files)))
    gates = section(html, "gates")
    assert "not run ≤ 1e-4 Core ML has no fp32." in gates
    assert "layers_00_02 not run" in gates
    assert "Core ML, macOS 26.1 (25B78), Apple M4 Max" in words(html)
    assert re.search(r"Not run: [^.]*program_error", words(html))


def test_a_missed_threshold_is_in_the_first_line_and_red() -> None:
    file = sample.parity("head_0")
    file["gate"][3] |= {"value": 29.5, "passed": False}
    html = render(sample.build(parity=(sample.parity("layers_00_02"), file, sample.parity("stack"))))
    assert "1 of 22 gate numbers missed the threshold." in words(html)
    assert "head_0 : psnr is 29.5 , must be ≥ 30" in words(html)
    assert 'class="verdict is-failed"' in html
    assert "29.5 ≥ 30 missed 0.5 under · worst of 3, in head_0" in section(html, "gates")


def test_apple_s_runtime_has_a_section_if_the_config_asked_for_it(page: str) -> None:
    """Its numbers stand in it, and its version beside the other engines; no word of it otherwise."""
    asked = "Does Apple's own runtime compute the same?"
    gates = section(page, "gates")
    assert asked in gates and "4.5e-7 ≤ 1e-4 holds" in gates
    assert "Apple's Core AI runtime, coreai-core 1.0.0b3" in words(page)
    without = words(render(sample.build(witness=())))
    assert asked not in without and "Core AI" not in without


def test_a_prediction_of_the_arithmetic_is_called_predicted_and_never_measured(page: str) -> None:
    rows = [
        {"precision": "fp16", "deviations": [], "top1": 0.984375, "kl": 0.00125},
        {"precision": "ane:tables", "deviations": ["tables of 33 numbers"], "top1": 0.9375, "kl": 0.015},
        {"precision": "ane", "deviations": ["some", "other"], "top1": None, "kl": None},
    ]
    settings = {**sample.build().settings, "predict": ["ane:tables", "ane"]}
    html = render(sample.build(settings=settings, predicted={"tokens": 64, "costs": rows}))
    found = section(html, "predicted")
    assert "predicted Nothing in this table was measured on a Neural Engine." in found
    assert "fp16 no deviation 98.4 % 0.00125" in found
    assert "ane:tables tables of 33 numbers 93.8 % 0.015" in found
    assert "ane some; other a logit is not finite" in found
    assert elements(html).open == []
    assert "not run Only the portable engine predicts." in section(render(sample.build(settings=settings)), "predicted")
    assert 'id="predicted"' not in page


def test_measured_residency_is_called_measured() -> None:
    files = []
    for part in sample.PARTS:
        rows = [sample.row("conv", "ane", "measured"), sample.row("const", "no_device", "measured")]
        files.append(sample.residency(part) | {"evidence": "measured", "rows": rows, "findings": []})
    html = render(sample.build(residency=tuple(files), speed=sample.speed(sample.COREML)))
    residency = section(html, "residency")
    assert "prefers it (measured)" in residency and "predicted" not in residency
    assert "Predicted, not measured" not in words(html)
    assert "Neural Engine speed" not in words(html)


def test_a_device_stands_apart_and_its_residency_beats_the_prediction() -> None:
    """Chip, speed, what went wrong, and the rule that an operation contradicts; the gate's own numbers stay."""
    plans = {
        f"{part}/residency.T={width}": results.planned(("conv", "conv_0", "ane"), ("matmul", "matmul_0", "ineligible"))
        for part in sample.PARTS
        for width in (1, 4)
    }
    wrong = {"head_0/parity.T=4": results.line("wrong", "psnr is 3.00 dB")}
    device = results.evidence({**results.measurements(), **plans, **wrong})
    html = render(sample.build(devices=(device,), stale=("old.json",)))
    found, text = section(html, "devices"), words(html)
    assert "Apple M4 Max, macOS 26.1 (25B78) measured" in found
    assert "1 20.00 50.0 7 of 8" in found and "4 30.00 133.3" in found
    assert "head_0/parity.T=4: psnr is 3.00 dB" in found
    assert "matmul matmul_0 layers_00_02 eligible no rule is against it ineligible" in found
    assert "evidence/old.json is of programs that this build no longer has" in found
    assert "prefers it (measured)" in section(html, "residency")
    assert "Predicted, not measured: Neural Engine residency." not in text and "4 of them by prediction" in text


def test_passes_of_a_shorter_context_say_their_slots() -> None:
    device = results.evidence()
    described = device.variant["described"]
    assert "slots" not in section(render(sample.build(devices=(device,))), "devices")
    short = replace(device, variant={**device.variant, "described": {**described, "context": 16}})
    text = section(render(sample.build(devices=(replace(device, shorter=(short,)),))), "devices")
    assert "slots tokens of a pass" in text
    assert f"{described['context']} 1 20.00" in text and "16 1 20.00" in text


def test_what_another_engine_gave_is_no_measurement_of_the_neural_engine(page: str) -> None:
    assert 'id="devices"' not in page
    html = render(sample.build(devices=(results.evidence(engine="portable_coreml"),)))
    assert "portable_coreml another engine" in section(html, "devices")
    assert "Predicted, not measured: Neural Engine residency." in words(html)


def test_that_no_apple_hardware_has_run_a_build_is_said_until_one_has(page: str) -> None:
    """By a gate, by the benchmark, or by a kit on another machine; another engine's kit is none of these."""
    said = "These programs have not run on Apple hardware."
    assert words(page).index(said) < words(page).index("What this build does not show")
    assert said in words(render(sample.build(devices=(results.evidence(engine="portable_coreml"),))))
    assert said not in words(render(sample.build(devices=(results.evidence(),))))
    assert said not in words(render(sample.build(speed=sample.speed(sample.COREML))))
    residency = tuple(file | {"engine": sample.COREML} for file in sample.build().residency)
    gated = sample.build()
    assert said not in words(render(replace(gated, verdicts={**gated.verdicts, "residency": residency})))


def test_findings_carry_rule_remedy_and_parts(page: str) -> None:
    residency = section(page, "residency")
    assert "warning Rule S7 Remedy: put a wide axis last." in residency
    assert "'x' is padded layers_00_02, head_0" in residency


def test_benchmark_names_engine_machine_and_what_was_run(page: str) -> None:
    benchmark = section(page, "benchmark")
    assert "portable engine (CPU, torch) torch 2.13.0" in benchmark and "Quiet CPU" in benchmark
    assert "8 cores, 4 threads used, fp32, Python 3.12.1" in benchmark
    assert "2 prompt lengths of some/code.txt, 2 tasks" in benchmark
    assert "each 3 times per drafter: none, ngram, learned; up to 40 new tokens" in benchmark
    assert "ready after 4.6 s" in benchmark and "took 0.75 s the first time, 0.25 s later" in benchmark
    assert "Tiled code is the best case" in benchmark
    assert "say nothing about the Neural Engine" in benchmark


def test_a_benchmark_through_core_ml_names_no_threads() -> None:
    html = render(sample.build(speed=sample.speed(sample.COREML)))
    assert "8 cores, Python 3.12.1" in section(html, "benchmark")


@pytest.mark.parametrize(
    ("engine", "said"),
    [(sample.PORTABLE, "8 cores, 4 threads used, fp32, Python 3.12.1"), (sample.COREML, "8 cores, Python 3.12.1")],
    ids=["portable", "Core ML"],
)
def test_an_encoder_s_benchmark_names_threads_where_there_are_any(engine: dict[str, str], said: str) -> None:
    shown = {"speed": sample.sentences(engine), "model": {"model": "small"}, "states": STATES}
    text = words(environment().from_string(ALONE.replace("SECTION", "sentences.html")).render(shown))
    assert said in text and "320.5 a second" in text and "80.2 a second" in text


def test_live_and_replayed_figures_stand_apart_in_every_row(page: str) -> None:
    benchmark = section(page, "benchmark")
    row = "372 1 prompt ngram 24.75 36.25 1.62 × 1.37 to 1.87 1.85 50 % accepted 2.35 51.2 % accepted 17.5"
    assert f"{row} identical length" in benchmark
    assert "free text 2 prompts ngram 24.75 36.25 0.98 ×" in benchmark
    assert "none 24.75 36.25 1.01 × 0.76 to 1.26 1.00 no drafts" in benchmark


def test_the_cost_of_a_pass_and_of_the_prefill_is_told(page: str) -> None:
    benchmark = section(page, "benchmark")
    assert "12.50 ms at T = 1, 15.50 ms at T = 4" in benchmark
    assert "pays above 1.24 tokens" in benchmark
    assert "Prefill runs at 71.8 tokens per second at 100 (3.54 × decoding at T = 1)." in benchmark


def test_a_model_of_one_width_has_nothing_to_break_even(page: str) -> None:
    only = sample.speed() | {"pass_seconds": {"1": 0.0125}, "break_even": None}
    assert "A pass takes 12.50 ms at T = 1. Prefill" in section(render(sample.build(speed=only)), "benchmark")


def test_what_the_benchmark_did_not_run_is_there_with_its_reason(page: str) -> None:
    benchmark, limits = section(page, "benchmark"), section(page, "limits")
    assert "not run 800 tokens: context has room for 400 prompt tokens" in benchmark
    assert "not run draft_model: it needs a second build" in benchmark
    assert "There is no meter. To measure it: sudo shardmill bench build/small" in limits
    assert "shardmill bench build/small --draft build/SMALLER" in limits
    assert "benchmark of 800 tokens" in limits


def test_a_width_without_a_pass_is_a_gap() -> None:
    file = sample.speed()
    file["not_run"] = [{"kind": "width", "what": "4", "reason": "no draft was worth verifying"}]
    html = render(sample.build(speed=file))
    assert "not run a pass of 4 tokens: no draft was worth verifying" in section(html, "benchmark")
    assert "time of a pass of 4 tokens" in section(html, "limits")


def test_energy_that_was_measured_is_shown_and_no_gap(page: str) -> None:
    file = sample.speed()
    file["sweep"][0] |= {"mj_per_token": 87.5, "plain_mj_per_token": 99.5}
    file["not_run"] = []
    html = render(sample.build(speed=file))
    assert "87.5 99.5" in section(html, "benchmark")
    assert "energy" not in section(html, "limits")
    assert "mJ per token" in section(html, "benchmark") and "mJ per token" not in section(page, "benchmark")


def test_nothing_measured_is_not_run_instead_of_empty_plots() -> None:
    nothing = sample.speed() | {"sweep": [], "tasks": [], "prefill": [], "pass_seconds": {}, "break_even": None}
    html = render(sample.build(speed=nothing))
    assert "not run No prompt was measured." in section(html, "benchmark")
    assert "A pass takes" not in section(html, "benchmark")
    assert 'class="plot"' not in html
    assert re.search(r"Not run: [^.]*benchmark", words(html))


def test_a_benchmark_that_the_config_leaves_out_is_not_run() -> None:
    html = render(sample.build(speed=None))
    assert "Not run: benchmark." in words(html) and "Neural Engine speed" not in words(html)
    way = "snakemake --cores 4 all measures benchmark: without benchmark: false in this build's config."
    assert way in words(html)
    assert section(html, "benchmark") == "Benchmark not run The config leaves it out: benchmark: false ."
    assert "Benchmark ran on not run" in words(html) and elements(html).open == []


def test_speculation_that_changes_the_output_fails_the_verdict() -> None:
    """However fast it is, and whatever the gates say; which text and from which token on is told."""
    wrong = sample.speed()
    wrong["sweep"][3] |= {"exact": 2 / 3, "differs": [{"prompt": "code.txt", "token": 57}]}
    wrong["tasks"][2] |= {"exact": 0.5, "differs": [{"prompt": "2.txt", "token": 3}]}
    html = render(sample.build(speed=wrong))
    assert 'class="verdict is-failed"' in html
    assert "Failed: exact speculation." in words(html)
    assert "other tokens than without: 372 tokens (ngram), free text (ngram)." in section(html, "limits")
    assert "different 66.7 % of requests the same; code.txt from token 57 on" in section(html, "benchmark")


def turned(margin: float | None, engine: dict[str, Any]) -> str:
    """The page of a build whose logits change places if they are less than 0.05 apart, and one of which did."""
    speed = sample.speed() | {"engine": engine}
    differs = [{"prompt": "code.txt", "token": 57, "margin": margin}]
    speed["sweep"][3] |= {"exact": 2 / 3, "differs": differs, "verified_again": 5}
    build = sample.build(speed=speed)
    return render(replace(build, model={**build.model, "margin": 0.05}))


def test_on_core_ml_a_near_tie_that_drafting_turns_is_a_close_call() -> None:
    """No failure: widths round apart there. How near it was is told."""
    html = turned(0.0125, sample.COREML)
    assert 'class="verdict is-failed"' not in html and "Failed:" not in words(html)
    assert (
        "close call 66.7 % of requests the same; code.txt from token 57 on, whose two best logits are 0.0125 apart"
        in (section(html, "benchmark"))
    )
    assert "5 tokens run again alone" in section(html, "benchmark")
    assert "logits less than 0.05 apart may change places. At the first token" in section(html, "limits")
    assert "Failed:" not in words(turned(None, sample.COREML))  # the server told them apart by no text


def test_what_rounding_cannot_turn_is_a_failure() -> None:
    """On Core ML a token that was clear, on the portable engine any."""
    for html in (turned(0.06, sample.COREML), turned(0.0125, sample.PORTABLE)):
        assert "Failed: exact speculation." in words(html) and "close call 66.7" not in words(html)


@pytest.mark.parametrize(("row", "ratio"), [(1, 13.9), (0, 0.6), (0, 1.2)])
def test_a_ratio_that_drafts_cannot_cause_is_called_noisy(page: str, row: int, ratio: float) -> None:
    """More than the tokens per pass, or T = 1 that is slower or faster than itself."""
    wild = sample.speed()
    wild["sweep"][row]["speedup"] = ratio
    assert "noisy 100 tokens: a ratio of times" in section(render(sample.build(speed=wild)), "benchmark")
    assert "noisy" not in words(page)


def test_sizes_stand_beside_the_limit(page: str) -> None:
    """1.5 GiB, half more than the newest of its systems takes; what is not there is missing."""
    sizes = section(page, "sizes")
    assert "head_0 rows 0 to 1 023 2 98 400 1.5 GiB 150 % macOS 15 to 26 2 GiB stateless" in sizes
    assert "(macOS 15 to 27), the Neural Engine takes a file of weights of at most 1 GiB" in sizes
    assert "Warning: on macOS 27 the larger programs are expected on the CPU." in sizes
    older = sample.plan() | {"systems": ["macOS 15", "macOS 26"], "weight_file_limit": 2**31}
    named = section(render(sample.build(plan=older)), "sizes")
    assert "1.5 GiB 75 % all 2 GiB" in named and "Warning" not in named
    assert "256 KiB" in sizes  # 2 layers, k and v, fp16 [1, 1024, 32]
    assert "98 304 missing n/a, on the host n/a, on the host missing" in sizes


def test_provenance_shows_short_hashes_with_the_whole_in_the_title(page: str) -> None:
    provenance = section(page, "provenance")
    assert "who/what, " + "f" * 40 in provenance
    assert f'<code title="{"e" * 64}">{"e" * 12}</code>' in page
    assert f'<code title="{"layers_00_02":0<64}">layers_00_02</code>' in page
    assert "coremltools 9.0" in provenance


def test_missing_receipts_are_missing_in_the_list_of_steps() -> None:
    kept = {name: receipt for name, receipt in sample.receipts().items() if name != "packages/head_0"}
    listed = section(render(sample.build(receipts=kept)), "pipeline")
    assert "convert 2 programs missing head_0" in listed
    assert "convert 2 programs made" in section(render(sample.build()), "pipeline")


@pytest.mark.parametrize("place", ["model", "detail", "finding", "operation", "processor", "tensor file", "setting"])
def test_markup_in_names_and_texts_is_shown_and_does_nothing(place: str) -> None:
    """A checkpoint, a file name or an error text can hold anything."""
    html = render(sample.build(**with_evil(place)))
    assert "<script" not in html
    assert EVIL in unescape(html)
    assert elements(html).open == []


def with_evil(place: str) -> dict[str, Any]:
    """The build's files with EVIL in one place."""
    parity, residency, speed = sample.parity("head_0"), sample.residency("head_0"), sample.speed()
    parity["gate"][0]["detail"] = EVIL
    if place == "finding":
        residency["findings"][0]["why"] = EVIL
    if place == "operation":
        residency["rows"][0]["operation"] = EVIL
    speed["machine"]["processor"] = EVIL
    source = {"repo": None, "commit": "local", "files": {EVIL: {"sha256": "e" * 64, "size": 1}}}
    settings = sample.build().settings
    return {
        "model": {"model": {"model": EVIL, "parts": []}},
        "detail": {"parity": (parity,)},
        "finding": {"residency": (residency,)},
        "operation": {"residency": (residency,)},
        "processor": {"speed": speed},
        "tensor file": {"source": source, "settings": {**settings, "source": {"path": "a/folder"}}},
        "setting": {"settings": {**settings, "text": EVIL}},
    }[place]
