# What a built and gated model is: measured, described, attested, shown.


# Speed on this machine, of what has passed its gates.
rule benchmark:
    input:
        summary="build/{model}/plan.json",
        record=ancient("build/{model}/source.receipt.json"),
        bundles=ancient(expand("build/{{model}}/compiled/{part}.mlmodelc", part=C.parts)),
        table=ancient("build/{model}/embedding.safetensors"),
        text=C.benchmark.text,
        gates=sm.gate_receipts(C),
    output:
        speed="build/{model}/benchmark/speed.json",
    log:
        "build/{model}/logs/benchmark.log",
    conda:
        "../envs/shardmill.yaml"
    threads: workflow.cores  # alone on the machine, or the figures mean nothing
    resources:
        mem_mb=4000,
    params:
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
        table="build/{model}/embedding.safetensors",
        gates=sm.gate_receipts(C),
    output:
        made="build/{model}/model.json",
    log:
        "build/{model}/logs/manifest.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=500,
    params:
        store=STORE,
        tools=TOOLS["manifest"],
    script:
        "../scripts/manifest.py"


# Who was built from what, with which tools.
rule provenance:
    input:
        record="build/{model}/source.receipt.json",
        manifest="build/{model}/model.json",
        receipts=sm.all_receipts(C),
    output:
        made="build/{model}/provenance.json",
    log:
        "build/{model}/logs/provenance.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=500,
    params:
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
        packages=ancient(expand("build/{{model}}/packages/{part}.mlpackage", part=C.parts)),
        table=ancient("build/{model}/embedding.safetensors"),
        residency=expand("build/{{model}}/residency/{part}.json", part=C.parts),
        parity=expand("build/{{model}}/parity/{part}.json", part=[*C.parts, "stack"]),
        speed="build/{model}/benchmark/speed.json",
        receipts=sm.all_receipts(C),
    output:
        page="build/{model}/report.html",
    log:
        "build/{model}/logs/report.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=1000,
    params:
        settings=sm.settings(C),
        tools=TOOLS["report"],
    script:
        "../scripts/report.py"
