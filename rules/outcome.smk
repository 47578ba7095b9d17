# What a built and gated model is: measured, described, attested, shown.


# Speed on this machine, of what has passed its gates: there is no model.json before.
rule benchmark:
    input:
        manifest="build/{model}/model.json",
        text=C.benchmark.text,
        tasks=sm.task_files(C),
    output:
        speed="build/{model}/benchmark/speed.json",
        receipt="build/{model}/benchmark/speed.receipt.json",
    log:
        "build/{model}/logs/benchmark.log",
    conda:
        "../envs/shardmill.yaml"
    threads: sm.every_core(workflow)  # alone on the machine, or the figures mean nothing
    resources:
        mem_mb=MB("benchmark"),
    params:
        store=STORE,
        settings=sm.settings(C)["benchmark"],
        tools=TOOLS["benchmark"],
    script:
        "../scripts/benchmark.py"


# What a runtime needs to load and run the model.
rule manifest:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        packages=ancient(expand("build/{{model}}/packages/{part}.mlpackage", part=C.parts)),
        bundles=ancient(expand("build/{{model}}/compiled/{part}.mlmodelc", part=C.parts)),
        table=ancient("build/{model}/embedding.safetensors"),
        waits=[
            expand("build/{{model}}/packages/{part}.receipt.json", part=C.parts),
            expand("build/{{model}}/compiled/{part}.receipt.json", part=C.parts),
            "build/{model}/embedding.receipt.json",
            sm.gate_receipts(C),
        ],
    output:
        manifest="build/{model}/model.json",
    log:
        "build/{model}/logs/manifest.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("manifest"),
    params:
        store=STORE,
        form=C.convert.embedding,
        tools=TOOLS["manifest"],
    script:
        "../scripts/manifest.py"


# Who was built from what, with which tools.
rule provenance:
    input:
        record="build/{model}/source.receipt.json",
        manifest="build/{model}/model.json",
        receipts=sm.all_receipts(C),
        verdicts=sm.verdicts(C),
        text=C.parity.text,
        calibration=sm.calibration_files(C),
        recipe=sm.recipe_files(C),
    output:
        provenance="build/{model}/provenance.json",
        results="build/{model}/test-results.jsonl",
    log:
        "build/{model}/logs/provenance.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("provenance"),
    params:
        store=STORE,
        settings=sm.settings(C),
        tools=TOOLS["provenance"],
    script:
        "../scripts/provenance.py"


# One page for a person.
rule report:
    input:
        manifest="build/{model}/model.json",
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        parts=expand("build/{{model}}/parts/{part}.json", part=[*C.parts, "embedding"]),
        artifacts=ancient(
            [
                expand("build/{{model}}/packages/{part}.mlpackage", part=C.parts),
                "build/{model}/embedding.safetensors",
            ]
        ),
        verdicts=sm.verdicts(C),
        speed="build/{model}/benchmark/speed.json",
        receipts=sm.page_receipts(C),
        search=sm.made_by("search", C),
        evidence=sm.evidence(C),
        points=sm.points(C),
    output:
        page=report(
            "build/{model}/report.html",
            caption="../report/page.rst",
            category="Result",
            labels={"file": "report.html"},
        ),
        plots=report(
            directory("build/{model}/plots"),
            patterns=["{name}.svg"],
            caption="../report/plots.rst",
            category="Speed",
            labels={"figure": "{name}"},
        ),
        receipt="build/{model}/report.receipt.json",
    log:
        "build/{model}/logs/report.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("report"),
    params:
        store=STORE,
        settings=sm.settings(C),
        pipeline=sm.drawn(C),
        tools=TOOLS["report"],
    script:
        "../scripts/report.py"
