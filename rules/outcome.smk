# Measure, describe, attest and show a model that has passed its gates.


# Speed on this machine. It needs model.json, which exists only after all gates have passed.
rule benchmark:
    input:
        manifest="build/{model}/model.json",
        beside=ancient(together(CHECKPOINT, PARTS(BUNDLE), "build/{model}/embedding.safetensors")),
        text=local(OF(options.benchmark_text)),
        tasks=local(OF(options.task_files)),
    output:
        speed="build/{model}/benchmark/speed.json",
        receipt="build/{model}/benchmark/speed.receipt.json",
    log:
        "build/{model}/logs/benchmark.log",
    threads: every_core(workflow)  # alone on the machine, or the figures mean nothing
    resources:
        mem_mb=MB("benchmark"),
        ane=1,
    params:
        store=STORE,
        step="benchmark",
        settings=OF(options.section, "benchmark"),
        engine=OF(options.engine),
        tools=TOOLS["benchmark"],
    script:
        "../scripts/step.py"


# What a runtime needs to load and run the model.
rule manifest:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        stack=ancient("build/{model}/parity/stack.json"),
        beside=ancient(CHECKPOINT),
        packages=ancient(PARTS(PACKAGE)),
        bundles=ancient(PARTS(BUNDLE)),
        table=ancient("build/{model}/embedding.safetensors"),
        waits=together(
            PARTS("build/{model}/packages/{part}.receipt.json"),
            PARTS("build/{model}/compiled/{part}.receipt.json"),
            "build/{model}/embedding.receipt.json",
            OF(sm.gate_receipts),
        ),
    output:
        manifest="build/{model}/model.json",
    log:
        "build/{model}/logs/manifest.log",
    resources:
        mem_mb=MB("manifest"),
    params:
        store=STORE,
        step="manifest",
        form=OF(options.option, "convert.embedding"),
        reshape=OF(options.option, "program.reshape_frequency"),
        tools=TOOLS["manifest"],
    script:
        "../scripts/step.py"


# Provenance: the inputs, outputs and tools of each step.
rule provenance:
    input:
        record="build/{model}/source.receipt.json",
        manifest="build/{model}/model.json",
        receipts=OF(sm.all_receipts),
        verdicts=OF(sm.verdicts),
        text=local(OF(options.option, "parity.text")),
        calibration=local(OF(options.calibration_files)),
        recipe=local(OF(options.recipe_files)),
    output:
        provenance="build/{model}/provenance.json",
        results="build/{model}/test-results.jsonl",
    log:
        "build/{model}/logs/provenance.log",
    resources:
        mem_mb=MB("provenance"),
    params:
        store=STORE,
        step="provenance",
        settings=OF(options.settings),
        tools=TOOLS["provenance"],
    script:
        "../scripts/step.py"


# What the Neural Engine's arithmetic would cost, for a config with `predict`; only the report waits for this rule.
rule predicted:
    input:
        summary="build/{model}/plan.json",
        states=ancient("build/{model}/reference.safetensors"),
        bundles=ancient(PARTS(BUNDLE)),
        table=ancient("build/{model}/embedding.safetensors"),
        waits=together(
            "build/{model}/reference.receipt.json",
            PARTS("build/{model}/compiled/{part}.receipt.json"),
            "build/{model}/embedding.receipt.json",
        ),
    output:
        costs="build/{model}/predicted.json",
        receipt="build/{model}/predicted.receipt.json",
    log:
        "build/{model}/logs/predicted.log",
    resources:
        mem_mb=MB("predicted"),
    params:
        store=STORE,
        step="predicted",
        precisions=OF(options.predicted_precisions),
        tools=TOOLS["predicted"],
    script:
        "../scripts/step.py"


# One page for a person.
rule report:
    input:
        manifest="build/{model}/model.json",
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        parts=PARTS("build/{model}/parts/{part}.json", "embedding"),
        artifacts=ancient(
            together(
                PARTS(PACKAGE),
                "build/{model}/embedding.safetensors",
            )
        ),
        verdicts=OF(sm.verdicts),
        speed=OF(sm.made_by, "benchmark"),
        receipts=OF(sm.page_receipts),
        search=OF(sm.made_by, "search"),
        evidence=OF(options.evidence),
        points=OF(sm.points),
        predicted=OF(sm.made_by, "predicted"),
    output:
        page=report(
            "build/{model}/report.html",
            caption="../report/page.rst",
            category="Result",
            labels={"file": "report.html"},
        ),
        plots=report(
            new_folder(PLOTS),
            patterns=["{name}.svg"],
            caption="../report/plots.rst",
            category="Speed",
            labels={"figure": "{name}"},
        ),
        receipt="build/{model}/report.receipt.json",
    log:
        "build/{model}/logs/report.log",
    resources:
        mem_mb=MB("report"),
    params:
        store=STORE,
        step="report",
        settings=OF(options.settings),
        pipeline=OF(sm.listed_steps),
        tools=TOOLS["report"],
    script:
        "../scripts/step.py"
