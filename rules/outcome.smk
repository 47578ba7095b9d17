# Measure, describe, attest and show a model that has passed its gates.

GATES = made.gates(workflow)
OF_THE_MODEL = made.of_the_model(workflow)


# What a runtime needs to load and run the model.
use rule aside as manifest with:
    input:
        **made_by(rules.fetch, rules.convert, rules.compile, rules.embedding, rules.expected, every="part", after=GATES),
        summary="build/{model}/plan.json",
        stack=ancient("build/{model}/parity/stack.json"),
    output:
        manifest="build/{model}/model.json",
    log:
        "build/{model}/logs/manifest.log",
    params:
        form=OF(options.option, "convert.embedding"),
        reshape=OF(options.option, "program.reshape_frequency"),
        tools=TOOLS["manifest"],


# Speed on this machine. It needs model.json, which exists only after all gates have passed.
use rule engine_step as benchmark with:
    input:
        manifest="build/{model}/model.json",
        beside=ancient(together(CHECKPOINT, files_of(rules.compile, rules.embedding))),
        text=local(OF(options.benchmark_text)),
        tasks=local(OF(options.task_files)),
    output:
        speed="build/{model}/benchmark/speed.json",
        receipt="build/{model}/benchmark/speed.receipt.json",
    log:
        "build/{model}/logs/benchmark.log",
    threads: every_core(workflow)  # alone on the machine, or the figures mean nothing
    params:
        settings=OF(options.section, "benchmark"),
        aside=True,
        tools=TOOLS["benchmark"],


# Provenance: the inputs, outputs and tools of each step.
use rule aside as provenance with:
    input:
        record="build/{model}/source.receipt.json",
        manifest="build/{model}/model.json",
        receipts=receipts_of(*OF_THE_MODEL),
        verdicts=files_of(*GATES),
        text=local(OF(options.option, "parity.text")),
        calibration=local(OF(options.calibration_files)),
        recipe=local(OF(options.recipe_files)),
    output:
        provenance="build/{model}/provenance.json",
        results="build/{model}/test-results.jsonl",
    log:
        "build/{model}/logs/provenance.log",
    params:
        settings=OF(options.settings),
        locks=OF(options.lock_names),
        tools=TOOLS["provenance"],


# What the Neural Engine's arithmetic would cost, for a config with `predict`; only the report waits for this rule.
use rule aside as predicted with:
    input:
        **made_by(rules.reference, rules.compile, rules.embedding, every="part"),
        summary="build/{model}/plan.json",
    output:
        costs="build/{model}/predicted.json",
        receipt="build/{model}/predicted.receipt.json",
    log:
        "build/{model}/logs/predicted.log",
    params:
        precisions=OF(options.predicted_precisions),
        tools=TOOLS["predicted"],


# One page for a person.
use rule aside as report with:
    input:
        manifest="build/{model}/model.json",
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        parts=PARTS("build/{model}/parts/{part}.json", "embedding"),
        artifacts=ancient(files_of(rules.convert, rules.embedding)),
        verdicts=files_of(*GATES),
        speed=files_of(rules.benchmark),
        receipts=receipts_of(*OF_THE_MODEL, rules.original, rules.measured, rules.predicted),
        search=files_of(rules.search),
        evidence=OF(options.evidence),
        points=files_of(rules.measured),
        predicted=files_of(rules.predicted),
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
        hashes="build/{model}/report.receipt.json",
    log:
        "build/{model}/logs/report.log",
    params:
        settings=OF(options.settings),
        pipeline=OF(partial(sm.listed_steps, workflow)),
        tools=TOOLS["report"],
