# Gates: a job that misses a threshold fails, and nothing after it is built.


# Where each operation runs: measured on a Mac, predicted elsewhere.
use rule engine_step as residency with:
    input:
        **made_by(rules.convert, rules.compile),
        part="build/{model}/parts/{part}.json",
    output:
        verdict=verdict("build/{model}/residency/{part}.json", "residency"),
        receipt="build/{model}/residency/{part}.receipt.json",
    log:
        "build/{model}/logs/residency_{part}.log",
    params:
        systems=OF(options.named_systems),
        limits=OF(options.device_limits),
        tools=TOOLS["residency"],


# Compare a part with transformers: is it the intended graph, do all T agree, and what do INT8 and fp16 cost?
use rule engine_step as parity with:
    input:
        **made_by(rules.fetch, rules.precision, rules.reference, rules.convert, rules.compile, perhaps(rules.codes)),
        summary="build/{model}/plan.json",
        part="build/{model}/parts/{part}.json",
    output:
        verdict=verdict("build/{model}/parity/{part}.json", "parity"),
        receipt="build/{model}/parity/{part}.receipt.json",
    log:
        "build/{model}/logs/parity_{part}.log",
    params:
        reshape=OF(options.option, "program.reshape_frequency"),
        tools=TOOLS["parity"],


# All parts chained, against transformers, in logits.
use rule engine_step as parity_stack with:
    input:
        **made_by(
            rules.fetch,
            rules.precision,
            rules.reference,
            rules.convert,
            rules.compile,
            rules.embedding,
            perhaps(rules.search),
            every="part",
        ),
        summary="build/{model}/plan.json",
        parts=PARTS("build/{model}/parts/{part}.json", "embedding"),
    output:
        verdict=verdict("build/{model}/parity/stack.json", "parity_stack", part="all parts chained"),
        receipt="build/{model}/parity/stack.receipt.json",
    log:
        "build/{model}/logs/parity_stack.log",
    priority: 1  # the longest of the gates
    params:
        reshape=OF(options.option, "program.reshape_frequency"),
        tools=TOOLS["parity_stack"],


# A part on Apple's Core AI runtime, for a config with `witness: true`.
use rule engine_step as witness with:
    input:
        **made_by(rules.fetch, rules.reference, rules.convert, rules.compile),
        summary="build/{model}/plan.json",
        part="build/{model}/parts/{part}.json",
    output:
        verdict=verdict("build/{model}/witness/{part}.json", "witness"),
        receipt="build/{model}/witness/{part}.receipt.json",
    log:
        "build/{model}/logs/witness_{part}.log",
    params:
        runtime=OF(options.witness_runtime),
        tools=TOOLS["witness"],
