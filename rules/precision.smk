# From what a text shows of a model to the form of each matrix. Only the last is made where nothing is calibrated.


# What transformers makes of the calibration text, at the edges of parts.
rule calibration:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        text=sm.calibration_files(C),
    output:
        edges="build/{model}/calibration.safetensors",
        receipt="build/{model}/calibration.receipt.json",
    log:
        "build/{model}/logs/calibration.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("calibration"),
    params:
        store=STORE,
        settings=sm.calibration_settings(C),
        tools=TOOLS["calibration"],
    script:
        "../scripts/calibration.py"


# The codes that a quantiser chooses for a part's matrices.
rule codes:
    input:
        part="build/{model}/parts/{part}.json",
        summary="build/{model}/plan.json",
        record=ancient("build/{model}/source.receipt.json"),
        edges=ancient("build/{model}/calibration.safetensors"),
        waits="build/{model}/calibration.receipt.json",
    output:
        codes="build/{model}/codes/{part}.safetensors",
        receipt="build/{model}/codes/{part}.receipt.json",
    log:
        "build/{model}/logs/codes_{part}.log",
    priority: 2  # conversion waits for it
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("codes"),
    params:
        store=STORE,
        forms=sm.coded_forms(C),
        tools=TOOLS["codes"],
    script:
        "../scripts/codes.py"


# What each matrix of a part costs by itself.
rule sensitivity:
    input:
        part="build/{model}/parts/{part}.json",
        summary="build/{model}/plan.json",
        record=ancient("build/{model}/source.receipt.json"),
        edges=ancient("build/{model}/calibration.safetensors"),
        codes=ancient("build/{model}/codes/{part}.safetensors"),
        waits=[
            "build/{model}/calibration.receipt.json",
            "build/{model}/codes/{part}.receipt.json",
        ],
    output:
        costs="build/{model}/sensitivity/{part}.json",
        receipt="build/{model}/sensitivity/{part}.receipt.json",
    log:
        "build/{model}/logs/sensitivity_{part}.log",
    priority: 2  # conversion waits for it
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("sensitivity"),
    params:
        store=STORE,
        tools=TOOLS["sensitivity"],
    script:
        "../scripts/sensitivity.py"


# The forms that a budget buys.
rule search:
    input:
        parts=expand("build/{{model}}/parts/{part}.json", part=C.parts),
        costs=ancient(expand("build/{{model}}/sensitivity/{part}.json", part=C.parts)),
        waits=expand("build/{{model}}/sensitivity/{part}.receipt.json", part=C.parts),
    output:
        chosen="build/{model}/search.json",
        receipt="build/{model}/search.receipt.json",
    log:
        "build/{model}/logs/search.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("search"),
    params:
        store=STORE,
        settings=sm.search_settings(C),
        tools=TOOLS["search"],
    script:
        "../scripts/search.py"


# In which form each matrix is stored.
rule precision:
    input:
        parts=expand("build/{{model}}/parts/{part}.json", part=C.parts),
        source=sm.recipe_files(C),
        chosen=ancient(sm.made_by("search", C)),
        waits=sm.receipts_of("search", C),
    output:
        recipe="build/{model}/precision.json",
        receipt="build/{model}/precision.receipt.json",
    log:
        "build/{model}/logs/precision.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("precision"),
    params:
        store=STORE,
        precision=C.convert.precision,
        tools=TOOLS["precision"],
    script:
        "../scripts/precision.py"


# What transformers makes of text that nothing is chosen by.
rule original:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        text=sm.calibration_files(C),
    output:
        states="build/{model}/measured/original.safetensors",
        receipt="build/{model}/measured/original.receipt.json",
    log:
        "build/{model}/logs/original.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("original"),
    params:
        store=STORE,
        settings=sm.measured_settings(C),
        tools=TOOLS["original"],
    script:
        "../scripts/original.py"


# What a set of forms costs there; only the report waits for it.
rule measured:
    input:
        summary="build/{model}/plan.json",
        parts=expand("build/{{model}}/parts/{part}.json", part=C.parts),
        record=ancient("build/{model}/source.receipt.json"),
        chosen=ancient("build/{model}/search.json"),
        states=ancient("build/{model}/measured/original.safetensors"),
        codes=ancient(expand("build/{{model}}/codes/{part}.safetensors", part=C.parts)),
        waits=[
            "build/{model}/search.receipt.json",
            "build/{model}/measured/original.receipt.json",
            expand("build/{{model}}/codes/{part}.receipt.json", part=C.parts),
        ],
    output:
        figures="build/{model}/measured/{point}.json",
        receipt="build/{model}/measured/{point}.receipt.json",
    log:
        "build/{model}/logs/measured_{point}.log",
    conda:
        "../envs/shardmill.yaml"
    resources:
        mem_mb=MB("measured"),
    params:
        store=STORE,
        point="{point}",
        tools=TOOLS["measured"],
    script:
        "../scripts/measured.py"
