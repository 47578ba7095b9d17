# Gates: a job that misses a threshold fails, and nothing after it is built.


# Where each operation runs: measured on a Mac, predicted elsewhere.
rule residency:
    input:
        part="build/{model}/parts/{part}.json",
        package=ancient(PACKAGE),
        bundle=ancient(BUNDLE),
        waits=[
            "build/{model}/packages/{part}.receipt.json",
            "build/{model}/compiled/{part}.receipt.json",
        ],
    output:
        verdict=report(
            "build/{model}/residency/{part}.json",
            caption="../report/residency.rst",
            category="Gates",
            subcategory="residency",
            labels={"part": "{part}"},
        ),
        receipt="build/{model}/residency/{part}.receipt.json",
    log:
        "build/{model}/logs/residency_{part}.log",
    resources:
        mem_mb=MB("residency"),
        ane=1,
    params:
        store=STORE,
        step="residency",
        engine=OF(options.engine),
        tools=TOOLS["residency"],
    script:
        "../scripts/step.py"


# Compare a part with transformers: is it the intended graph, do all T agree, and what do INT8 and fp16 cost?
rule parity:
    input:
        summary="build/{model}/plan.json",
        part="build/{model}/parts/{part}.json",
        recipe=ancient("build/{model}/precision.json"),
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
        states=ancient("build/{model}/reference.safetensors"),
        package=ancient(PACKAGE),
        bundle=ancient(BUNDLE),
        codes=ancient(OF(sm.made_by, "codes")),
        waits=together(
            "build/{model}/precision.receipt.json",
            "build/{model}/reference.receipt.json",
            "build/{model}/packages/{part}.receipt.json",
            "build/{model}/compiled/{part}.receipt.json",
            OF(sm.receipts_of, "codes"),
        ),
    output:
        verdict=report(
            "build/{model}/parity/{part}.json",
            caption="../report/parity.rst",
            category="Gates",
            subcategory="parity",
            labels={"part": "{part}"},
        ),
        receipt="build/{model}/parity/{part}.receipt.json",
    log:
        "build/{model}/logs/parity_{part}.log",
    resources:
        mem_mb=MB("parity"),
        ane=1,
    params:
        store=STORE,
        step="parity",
        reshape=OF(options.option, "program.reshape_frequency"),
        engine=OF(options.engine),
        tools=TOOLS["parity"],
    script:
        "../scripts/step.py"


# A part on Apple's Core AI runtime, for a config with `witness: true`.
rule witness:
    input:
        summary="build/{model}/plan.json",
        part="build/{model}/parts/{part}.json",
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
        states=ancient("build/{model}/reference.safetensors"),
        package=ancient(PACKAGE),
        bundle=ancient(BUNDLE),
        waits=[
            "build/{model}/reference.receipt.json",
            "build/{model}/packages/{part}.receipt.json",
            "build/{model}/compiled/{part}.receipt.json",
        ],
    output:
        verdict=report(
            "build/{model}/witness/{part}.json",
            caption="../report/witness.rst",
            category="Gates",
            subcategory="witness",
            labels={"part": "{part}"},
        ),
        receipt="build/{model}/witness/{part}.receipt.json",
    log:
        "build/{model}/logs/witness_{part}.log",
    resources:
        mem_mb=MB("witness"),
        ane=1,
    params:
        store=STORE,
        step="witness",
        engine=OF(options.engine),
        runtime=OF(options.witness_runtime),
        tools=TOOLS["witness"],
    script:
        "../scripts/step.py"


# All parts chained, against transformers, in logits.
rule parity_stack:
    input:
        summary="build/{model}/plan.json",
        parts=PARTS("build/{model}/parts/{part}.json", "embedding"),
        recipe=ancient("build/{model}/precision.json"),
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
        states=ancient("build/{model}/reference.safetensors"),
        packages=ancient(PARTS(PACKAGE)),
        bundles=ancient(PARTS(BUNDLE)),
        table=ancient("build/{model}/embedding.safetensors"),
        chosen=ancient(OF(sm.made_by, "search")),
        waits=together(
            "build/{model}/precision.receipt.json",
            "build/{model}/reference.receipt.json",
            PARTS("build/{model}/packages/{part}.receipt.json"),
            PARTS("build/{model}/compiled/{part}.receipt.json"),
            "build/{model}/embedding.receipt.json",
            OF(sm.receipts_of, "search"),
        ),
    output:
        verdict=report(
            "build/{model}/parity/stack.json",
            caption="../report/parity_stack.rst",
            category="Gates",
            subcategory="parity",
            labels={"part": "all parts chained"},
        ),
        receipt="build/{model}/parity/stack.receipt.json",
    log:
        "build/{model}/logs/parity_stack.log",
    priority: 1  # the longest of the gates
    resources:
        mem_mb=MB("parity_stack"),
        ane=1,
    params:
        store=STORE,
        step="parity_stack",
        reshape=OF(options.option, "program.reshape_frequency"),
        engine=OF(options.engine),
        tools=TOOLS["parity_stack"],
    script:
        "../scripts/step.py"
