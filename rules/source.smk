# From a checkpoint to parts: what the programs are made of.


# The checkpoint's files, linked into the build, each with its sha256.
rule fetch:
    input:
        files=sm.source_files(C),
    output:
        record="build/{model}/source.receipt.json",
    log:
        "build/{model}/logs/fetch.log",
    params:
        store=STORE,
        path=C.source.path,
        repo=C.source.repo,
        revision=C.source.revision,
        tools=TOOLS["fetch"],
    resources:
        mem_mb=500,
    conda:
        "../envs/shardmill.yaml"
    script:
        "../scripts/fetch.py"


# Which tensors each part is made of, read from headers; no weight is copied.
rule split:
    input:
        record="build/{model}/source.receipt.json",
    output:
        summary="build/{model}/plan.json",
        parts=expand("build/{{model}}/parts/{part}.json", part=[*C.parts, "embedding"]),
        receipt="build/{model}/plan.receipt.json",
    log:
        "build/{model}/logs/split.log",
    params:
        store=STORE,
        settings=sm.settings(C),
        tools=TOOLS["split"],
    resources:
        mem_mb=1000,
    conda:
        "../envs/shardmill.yaml"
    script:
        "../scripts/split.py"


# What transformers makes of the parity text with the original weights.
rule reference:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        text=C.parity.text,
    output:
        states="build/{model}/reference.safetensors",
        receipt="build/{model}/reference.receipt.json",
    log:
        "build/{model}/logs/reference.log",
    params:
        store=STORE,
        parity=sm.settings(C)["parity"],
        tools=TOOLS["reference"],
    resources:
        mem_mb=4000,
    conda:
        "../envs/shardmill.yaml"
    script:
        "../scripts/reference.py"
