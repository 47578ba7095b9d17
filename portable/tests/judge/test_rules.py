"""Every rule of the rule book has a program that breaks it and one that keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from portable_coreml.files.features import Feature
from portable_coreml.files.read_text import read_text
from portable_coreml.judge.placement import op_verdicts
from portable_coreml.judge.rule import SEVERITIES, Subject, Target
from portable_coreml.judge.rules import RULES
from portable_coreml.judge.rules.__main__ import rules_page

X = "tensor<fp16, [1, 64, 1, 32]> x"
CACHE, WEIGHT = "tensor<fp16, [1, 1, 64, 32]>", "tensor<fp16, [64, 64, 1, 1]>"
BLOB = 'BLOBFILE(path = string("w"), offset = uint64(64))'
RELU = "tensor<fp16, [1, 64, 1, 32]> y = relu(x = x);"
STATE = "state<tensor<fp16, [1, 1, 64, 32]>> k, " + X
ROW = "tensor<fp16, [1, 64, 1, 32]> y"
FLAG = "bool no = const()[val = bool(false)]; "
RANGE = ((1, 1), (64, 64), (1, 4), (32, 32))


def subject(line: str = RELU, params: str = X, **changes: Any) -> Subject:
    """A function of one line, described as taking and giving fp16 tensors of its shapes."""
    program = read_text(f"program(1.3){{ func main<ios18>({params}) {{ {line} }} -> (x); }}")
    made = Subject(
        program.functions["main"],
        (Feature("x", "fp16", (1, 64, 1, 32)),),
        (Feature("y", "fp16", (1, 64, 1, 32)),),
        spec_version=9,
        function_count=1,
        weight_bytes=100_000_000,
    )
    return replace(made, **changes)


def described(**changes: Any) -> dict[str, Any]:
    """Changes of the described input x."""
    return {"inputs": (replace(Feature("x", "fp16", (1, 64, 1, 32)), **changes),)}


def weighted(op: str, weight: str, out: str) -> str:
    return f"tensor<fp16, {weight}> w = const()[val = tensor<fp16, {weight}>({BLOB})]; {out} = {op};"


def dequantized(scale: str) -> str:
    return (
        f"{WEIGHT} w = constexpr_blockwise_shift_scale(data = tensor<int8, [64, 64, 1, 1]>({BLOB}), "
        f"scale = tensor<fp16, {scale}>({BLOB})); tensor<fp16, [1, 64, 1, 32]> y = conv(weight = w, x = x);"
    )


def lut(dtype: str) -> str:
    return (
        f"tensor<{dtype}, [64, 64, 1, 1]> w = constexpr_lut_to_dense(indices = tensor<uint4, [64, 64, 1, 1]>({BLOB}), "
        f"lut = tensor<{dtype}, [1, 1, 1, 1, 16, 1]>({BLOB}));"
    )


def scored(extents: str) -> str:
    """Softmax over scores of two heads."""
    scores = f"tensor<fp16, [1, 2, {extents}]>"
    return f"{scores} s = reshape(x = x); {scores} y = softmax(x = s);"


def affine(dtype: str) -> str:
    return f"{WEIGHT} w = constexpr_affine_dequantize()[quantized_data = tensor<{dtype}, [64, 64, 1, 1]>({BLOB})];"


def updated(consumer: str) -> str:
    return (
        f"{CACHE} old = read_state(input = k); tensor<int32, [4]> b = const()[val = tensor<int32, [4]>([0, 0, 0, 0])]; "
        f"{CACHE} new = slice_update(begin = b, end = b, update = old, x = old); {consumer}"
    )


WRITE = "write_state(data = new, input = k);"
OLD_CHIP, IPHONE = {"target": Target(chip=2)}, {"target": Target(named=("iOS 18",))}
TOPK = (
    "tensor<fp16, [1, 64, 1, 4]> v, tensor<{0}, [1, 64, 1, 4]> i = topk(x = x); "
    "tensor<fp16, [1, 64, 1, 4]> z = relu(x = i);"
)
SCORES = "tensor<fp16, [1, 64, 1, 32]> y = softmax(x = x);"
THREE_STATES = f"state<{CACHE}> k, state<{CACHE}> k2, state<{CACHE}> k3, {X}"
CASES: dict[str, tuple[Subject, Subject]] = {
    "S1": (subject("tensor<fp16, [1, 1, 1, 1, 64, 32]> y = reshape(x = x);"), subject()),
    "S2": (
        subject(
            "tensor<fp16, [1, 1, 64, 1, 32]> a = reshape(x = x); tensor<fp16, [1, 1, 64, 1, 32]> y = softmax(x = a);"
        ),
        subject("tensor<fp16, [1, 64, 1, 32]> y = softmax(x = x);"),
    ),
    "S3": (
        subject("tensor<fp16, [1, 65537]> y = reshape(x = x);"),
        subject("tensor<fp16, [1, 65536]> y = reshape(x = x);"),
    ),
    "S4": (
        subject("tensor<fp16, [1, 1, 1, 16385]> y = reshape(x = x);", **OLD_CHIP),
        subject("tensor<fp16, [1, 1, 1, 16384]> y = reshape(x = x);", **OLD_CHIP),
    ),
    "S5": (
        subject("tensor<fp16, [1, 40000]> a = reshape(x = x); tensor<fp16, [1, 1]> y = matmul(x = a, y = a);"),
        subject("tensor<fp16, [1, 32768]> a = reshape(x = x); tensor<fp16, [1, 1]> y = matmul(x = a, y = a);"),
    ),
    "S7": (subject(**described(shape=(1, 64, 32, 1))), subject()),
    "S8": (subject(params=STATE.replace("64, 32]", "64, 270]", 1)), subject(params=STATE)),
    "S9": (subject(scored("1024, 1024")), subject(scored("1023, 1023"))),
    "S11": (subject(SCORES, **described(shape=(1, 64, 512, 1))), subject(SCORES, **described(shape=(1, 64, 520, 1)))),
    "S12": (subject(SCORES, **described(shape=(1, 64, 2048, 1))), subject(SCORES, **described(shape=(1, 64, 1024, 1)))),
    "T1": (subject(**described(dtype="fp32")), subject()),
    "T2": (
        subject("tensor<int32, [1, 64, 1, 32]> y = cast(x = x);"),
        subject("tensor<fp16, [1, 64, 1, 32]> y = cast(x = x);"),
    ),
    "T3": (
        subject(
            "tensor<fp16, [1, 64]> y = gather(indices = x, x = x);", "tensor<int32, [1]> x", **described(dtype="int32")
        ),
        subject("tensor<int32, [1]> y = add(x = x, y = x);", "tensor<int32, [1]> x", **described(dtype="int32")),
    ),
    "T4": (
        subject("tensor<fp16, [1]> y = gather(indices = x, x = x);", "tensor<int16, [1]> x"),
        subject("tensor<fp16, [1]> y = gather(indices = x, x = x);", "tensor<uint16, [1]> x"),
    ),
    "O1": (subject("tensor<fp16, [1, 64, 1, 32]> y = scatter(x = x);"), subject()),
    "O2": (subject(FLAG + "tensor<fp16, [1, 64, 1, 32]> y = cond(pred = no) () { } -> (x) () { } -> (x);"), subject()),
    "O3": (subject(TOPK.format("int32")), subject("tensor<fp16, [1, 64, 1, 1]> y = reduce_max(x = x);")),
    "O4": (subject("tensor<fp16, [1, 64, 1, 32]> y = cumsum(x = x);"), subject()),
    "O5": (
        subject("tensor<fp16, [1]> y = gather(indices = x, x = x);", "tensor<uint16, [1]> x"),
        subject("int32 i = const()[val = int32(0)]; tensor<fp16, [64, 1, 32]> y = gather(indices = i, x = x);"),
    ),
    "O6": (subject("tensor<fp16, [1, 64, 1, 32]> y = linear(x = x);"), subject()),
    "O7": (
        subject("tensor<fp16, [1, 64, 1, 32]> y = conv(weight = x, x = x);"),
        subject(weighted("conv(weight = w, x = x)", "[64, 64, 1, 1]", ROW)),
    ),
    "O8": (subject("tensor<fp16, [1, 64, 1, 32]> y = scaled_dot_product_attention(query = x);"), subject()),
    "O13": (
        subject(
            "tensor<fp16, [1, 64, 1, 16]> y = slice_by_index(begin = tensor<int32, [4]>([0, 0, 0, 16]), x = x);",
            **OLD_CHIP,
        ),
        subject(
            "tensor<fp16, [1, 64, 1, 16]> y = slice_by_index(begin = tensor<int32, [4]>([0, 16, 0, 0]), x = x);",
            **OLD_CHIP,
        ),
    ),
    "O14": (
        subject("tensor<fp16, [1, 64, 1, 4]> y = conv(strides = tensor<int32, [2]>([1, 7]), x = x);"),
        subject("tensor<fp16, [1, 64, 1, 4]> y = conv(strides = tensor<int32, [2]>([1, 6]), x = x);"),
    ),
    "ST1": (subject(params=STATE, spec_version=8), subject(params=STATE)),
    "ST2": (subject(params=STATE.replace("1, 64, 32]", "1, ?, 32]", 1)), subject(params=STATE)),
    "ST3": (subject(updated("tensor<fp16, [1, 1, 64, 32]> y = relu(x = new);"), STATE), subject(updated(WRITE), STATE)),
    "ST5": (
        subject(updated(WRITE).replace("const()[val = tensor<int32, [4]>([0, 0, 0, 0])]", "cast(x = x)"), STATE),
        subject(updated(WRITE), STATE),
    ),
    "ST6": (subject(updated(WRITE), THREE_STATES), subject(params=THREE_STATES)),
    "ST9": (subject(params=STATE.replace("1, 64, 32]", "1, 4096, 32]", 1)), subject(params=STATE)),
    "D1": (subject(**described(ranges=((1, 1), (1, None)))), subject(**described(ranges=((1, 1), (1, 4))))),
    "D2": (subject(**described(ranges=RANGE)), subject()),
    "D3": (
        replace(
            subject(params=STATE),
            inputs=(replace(Feature("x", "fp16", (1,)), ranges=((1, 4),)), Feature("m", "fp16", (1,))),
        ),
        replace(subject(params=STATE), inputs=(replace(Feature("x", "fp16", (1,)), ranges=((1, 4),)),)),
    ),
    "D4": (
        replace(subject(params=STATE), inputs=(Feature("x", "int32", (1,), ranges=((1, 4),)),)),
        replace(subject(params=STATE), inputs=(Feature("x", "fp16", (1,), ranges=((1, 4),)),)),
    ),
    "D5": (
        replace(subject(params=STATE), inputs=(Feature("x", "fp16", (1,), choices=((1,), (4,))),)),
        subject(params=STATE),
    ),
    "D6": (
        subject("tensor<fp16, [1, 64, 1, 32]> y = layer_norm(x = x);", **described(choices=((1,), (2,)))),
        subject("tensor<fp16, [1, 64, 1, 32]> y = layer_norm(x = x);"),
    ),
    "D7": (
        subject(**described(choices=tuple((n,) for n in range(1, 130)))),
        subject(**described(choices=tuple((n,) for n in range(1, 129)))),
    ),
    "D8": (subject(function_count=2, **described(ranges=RANGE)), subject(function_count=2)),
    "D9": (subject("tensor<int32, [4]> y = shape(x = x);"), subject()),
    "W1": (subject(weight_bytes=(1 << 30) + 1), subject(weight_bytes=1 << 30)),
    "W2": (subject(weight_bytes=(1 << 30) + 1, **IPHONE), subject(weight_bytes=1 << 30, **IPHONE)),
    "W3": (subject(weight_bytes=1_500_000_000), subject()),
    "W5": (subject(weight_bytes=1_000_000), subject()),
    "W6": (subject(dequantized("[64, 2, 1, 1]")), subject(dequantized("[64, 1, 1, 1]"))),
    "W8": (subject(affine("int8")), subject(affine("uint8"))),
    "W9": (subject(lut("fp16")), subject()),
    "W10": (subject(lut("int8")), subject(lut("fp16"))),
    "L1": (
        subject(weighted("conv(weight = w, x = x)", "[16385, 64, 1, 1]", "tensor<fp16, [1, 16385, 1, 32]> y")),
        subject(weighted("conv(weight = w, x = x)", "[16384, 64, 1, 1]", "tensor<fp16, [1, 16384, 1, 32]> y")),
    ),
    "N1": (subject(f"{ROW} = matmul(x = x, y = x);"), subject()),
    "N2": (
        subject(f"{ROW.replace('y', 's')} = mul(x = x, y = x); {ROW} = reduce_mean(x = s);"),
        subject(
            f"{ROW.replace('y', 'q')} = real_div(x = x, y = x); {ROW.replace('y', 's')} = mul(x = q, y = q); "
            f"{ROW} = reduce_mean(x = s);"
        ),
    ),
    "N9": (subject(f"{ROW} = sigmoid(x = x);"), subject(f"{ROW} = silu(x = x);")),
    "N4": (
        subject("tensor<fp16, [1, 64, 1, 32]> y = add(x = x, y = fp16(-inf));"),
        subject("tensor<fp16, [1, 64, 1, 32]> y = add(x = x, y = fp16(-0x1.388p+13));"),
    ),
    "N5": (subject(f"{ROW} = silu(x = x);"), subject(f"{ROW} = tanh(x = x);")),
    "N6": (
        subject(f"{ROW.replace('y', 'p')} = softmax(x = x); {ROW} = matmul(x = p, y = x);"),
        subject(f"{ROW.replace('y', 'p')} = softmax(x = x); {ROW} = mul(x = p, y = fp16(0x1p+6));"),
    ),
}


def test_every_rule_has_its_two_programs() -> None:
    """A rule without a case here is a rule that nobody tried."""
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule_id", sorted(CASES))
def test_a_rule_strikes_where_it_should(rule_id: str) -> None:
    """Broken once, kept once; the finding names the rule and says what to do."""
    breaks, keeps = CASES[rule_id]
    found = list(RULES[rule_id].findings(breaks))
    assert found and all(f.rule == rule_id and f.why and f.remedy and f.severity in SEVERITIES for f in found)
    assert list(RULES[rule_id].findings(keeps)) == []


@pytest.mark.parametrize(
    ("size", "named", "found"),
    [
        (1 << 30, (), []),
        ((1 << 30) + 1, (), [("W1", "warn", "macOS 27"), ("W2", "warn", "iOS 18"), ("W2", "warn", "iOS 27")]),
        ((1 << 30) + 1, ("macOS 15", "macOS 26"), []),
        ((1 << 30) + 1, ("macOS 27",), [("W1", "error", "macOS 27")]),
        ((1 << 31) + 1, ("iOS 26",), [("W2", "error", "iOS 26")]),
        ((1 << 31) + 1, ("macOS 15", "macOS 26"), [("W1", "error", "macOS 15 to 26")]),
    ],
)
def test_what_only_some_systems_take_is_an_error_where_one_of_them_is_named(
    size: int, named: tuple[str, ...], found: list[tuple[str, str, str]]
) -> None:
    """Without a name, all known systems count, and what some of them take is a warning that names the others."""
    judged = subject(weight_bytes=size, target=Target(named=named))
    breaches = [one for rule in ("W1", "W2") for one in RULES[rule].findings(judged)]
    assert [(one.rule, one.severity, one.why.split("; ")[1].split(" takes ")[0]) for one in breaches] == found


def test_what_no_system_takes_is_an_error_without_a_name() -> None:
    over = subject(weight_bytes=(1 << 31) + 1)
    assert {one.severity for rule in ("W1", "W2") for one in RULES[rule].findings(over)} == {"error"}


def test_scores_of_a_flexible_program_are_counted_at_its_largest_shape() -> None:
    """64 tokens over 16,384 slots are the first that are too many."""
    for tokens, slots, wrong in ((64, 16384, True), (63, 16384, False), (64, 16383, False)):
        params = f"tensor<fp16, [1, 2, ?, 64]> q, tensor<fp16, [1, 2, {slots}, 64]> k"
        line = (
            "bool yes = const()[val = bool(true)]; bool no = const()[val = bool(false)]; "
            f"tensor<fp16, [1, 2, ?, {slots}]> s = matmul(transpose_x = no, transpose_y = yes, x = q, y = k); "
            f"int32 last = const()[val = int32(-1)]; tensor<fp16, [1, 2, ?, {slots}]> y = softmax(axis = last, x = s);"
        )
        flexible = Feature("q", "fp16", (1, 2, 1, 64), ranges=((1, 1), (2, 2), (1, tokens), (64, 64)))
        text = f"program(1.3){{ func main<ios18>({params}) {{ {line} }} -> (y); }}"
        judged = replace(subject(), function=read_text(text).functions["main"], inputs=(flexible,))
        assert [f.output for f in RULES["S9"].findings(judged)] == ["y"] * wrong


def test_lengths_that_are_reported_wrong_have_both_ends() -> None:
    """501 to 512 tokens of an encoder; a decoder's program of so many slots has states, or takes its cache as input."""
    for tokens in (500, 501, 512, 513):
        found = [*RULES["S11"].findings(subject(SCORES, **described(shape=(1, 64, tokens, 1))))]
        assert len(found) == (tokens in (501, 512))
    for other in (subject(SCORES, STATE), subject(SCORES), subject()):
        cached = replace(other, inputs=(Feature("k", "fp16", (1, 2, 512, 64)), Feature("x", "fp16", (1, 64, 4, 1))))
        assert not [*RULES["S11"].findings(cached)]


def test_wide_pointwise_heads_are_only_warned_of() -> None:
    """S3 is contested for the output channels of a 1x1 convolution, and nowhere else."""
    line = weighted("conv(weight = w, x = x)", "[65537, 64, 1, 1]", "tensor<fp16, [1, 65537, 1, 32]> y")
    assert [f.severity for f in RULES["S3"].findings(subject(line))] == ["warn"]
    assert [f.severity for f in RULES["S3"].findings(CASES["S3"][0])] == ["error"]


def test_a_sigmoid_times_its_argument_is_a_silu() -> None:
    """The compiler fuses the two, in either order; a gate by the sigmoid of another value stays."""
    gate = f"{ROW.replace('y', 's')} = sigmoid(x = x); {ROW.replace('y', 'r')} = relu(x = x); "
    for product in ("mul(x = s, y = x)", "mul(x = x, y = s)"):
        (found,) = RULES["N5"].findings(subject(f"{gate}{ROW} = {product};"))
        assert (found.output, found.severity, found.why) == ("y", "info", "SiLU, 1 in this function; this is the first")
    assert not list(RULES["N5"].findings(subject(f"{gate}{ROW} = mul(x = s, y = r);")))
    assert not list(RULES["N5"].findings(subject(f"{gate}{ROW} = mul(x = s, y = fp16(0x1p+0));")))


def test_eligible_ineligible_unknown_and_no_device_are_apart() -> None:
    """Whitelisted and unbroken: eligible; an error: ineligible; anything else: unknown; constants have no device."""
    line = FLAG + RELU + " tensor<fp16, [1, 64, 1, 32]> z = silu(x = x); tensor<int32, [1]> i = cast(x = x);"
    made = subject(line)
    rows = op_verdicts(made, [f for rule in RULES.values() for f in rule.findings(made)])
    assert [(row.output, row.status) for row in rows] == [
        ("no", "no_device"), ("y", "unknown"), ("z", "eligible"), ("i", "ineligible")
    ]  # fmt: skip


def test_bad_weights_make_their_consumer_ineligible() -> None:
    """Per-block scales are found at the constant, which has no device; it is the convolution that leaves the
    engine.
    """
    made = subject(dequantized("[64, 2, 1, 1]"))
    rows = {row.output: row for row in op_verdicts(made, list(RULES["W6"].findings(made)))}
    assert (rows["y"].status, rows["y"].rules) == ("ineligible", ("W6",))
    assert rows["w"].status == "no_device"


PAGE = Path(__file__).resolve().parents[3] / "docs" / "ane-rules.md"


def test_the_page_has_every_rule() -> None:
    """Each rule with its sources; contested ones say so."""
    page = rules_page()
    assert all(f"## {rule.id}: {rule.title}" in page for rule in RULES.values())
    assert page.count("- contested:") == sum(bool(rule.contested) for rule in RULES.values())


@pytest.mark.skipif(not PAGE.parent.is_dir(), reason="the page is part of the repository, not of the distribution")
def test_the_page_in_docs_is_the_rules() -> None:
    """An edit of the rules that leaves the page as it was fails here."""
    written = PAGE.read_text(encoding="utf-8")
    assert written == rules_page(), "write it again: python -m portable_coreml.judge.rules > docs/ane-rules.md"
