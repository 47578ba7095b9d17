# From a calibration text to the form of each matrix. Without calibration, only the rule `precision` runs.


# Transformers' hidden states for the calibration text, at the edges of parts.
rule calibration:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        beside=ancient(CHECKPOINT),
        text=local(OF(options.calibration_files)),
    output:
        edges="build/{model}/calibration.safetensors",
        receipt="build/{model}/calibration.receipt.json",
    log:
        "build/{model}/logs/calibration.log",
    resources:
        mem_mb=MB("calibration"),
    params:
        store=STORE,
        step="calibration",
        settings=OF(options.calibration_settings),
        tools=TOOLS["calibration"],
    script:
        "../scripts/step.py"


# The codes that a quantiser chooses for a part's matrices.
rule codes:
    input:
        part="build/{model}/parts/{part}.json",
        summary="build/{model}/plan.json",
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
        edges=ancient("build/{model}/calibration.safetensors"),
        waits="build/{model}/calibration.receipt.json",
    output:
        codes="build/{model}/codes/{part}.safetensors",
        receipt="build/{model}/codes/{part}.receipt.json",
    log:
        "build/{model}/logs/codes_{part}.log",
    priority: 2  # conversion waits for it
    resources:
        mem_mb=MB("codes"),
    params:
        store=STORE,
        step="codes",
        forms=OF(options.coded_forms),
        tools=TOOLS["codes"],
    script:
        "../scripts/step.py"


# What each matrix of a part costs by itself.
rule sensitivity:
    input:
        part="build/{model}/parts/{part}.json",
        summary="build/{model}/plan.json",
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
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
    threads: matrices_at_once
    resources:
        mem_mb=MB("sensitivity"),
    params:
        store=STORE,
        step="sensitivity",
        tools=TOOLS["sensitivity"],
    script:
        "../scripts/step.py"


# The forms that a budget buys.
rule search:
    input:
        parts=PARTS("build/{model}/parts/{part}.json"),
        costs=ancient(PARTS("build/{model}/sensitivity/{part}.json")),
        waits=PARTS("build/{model}/sensitivity/{part}.receipt.json"),
    output:
        chosen="build/{model}/search.json",
        receipt="build/{model}/search.receipt.json",
    log:
        "build/{model}/logs/search.log",
    resources:
        mem_mb=MB("search"),
    params:
        store=STORE,
        step="search",
        settings=OF(options.search_settings),
        tools=TOOLS["search"],
    script:
        "../scripts/step.py"


# In which form each matrix is stored.
rule precision:
    input:
        parts=PARTS("build/{model}/parts/{part}.json"),
        source=local(OF(options.recipe_files)),
        chosen=ancient(OF(sm.made_by, "search")),
        waits=OF(sm.receipts_of, "search"),
    output:
        recipe="build/{model}/precision.json",
        receipt="build/{model}/precision.receipt.json",
    log:
        "build/{model}/logs/precision.log",
    resources:
        mem_mb=MB("precision"),
    params:
        store=STORE,
        step="precision",
        precision=OF(options.option, "convert.precision"),
        tools=TOOLS["precision"],
    script:
        "../scripts/step.py"


# Transformers' results for a text that neither quantisers nor the search have seen.
rule original:
    input:
        summary="build/{model}/plan.json",
        record="build/{model}/source.receipt.json",
        beside=ancient(CHECKPOINT),
        text=local(OF(options.calibration_files)),
    output:
        states="build/{model}/measured/original.safetensors",
        receipt="build/{model}/measured/original.receipt.json",
    log:
        "build/{model}/logs/original.log",
    priority: 3  # reports a text that is too short before hours of other work
    resources:
        mem_mb=MB("original"),
    params:
        store=STORE,
        step="original",
        settings=OF(options.measured_settings),
        tools=TOOLS["original"],
    script:
        "../scripts/step.py"


# What a set of forms costs on that text; only the report waits for this rule.
rule measured:
    input:
        summary="build/{model}/plan.json",
        parts=PARTS("build/{model}/parts/{part}.json"),
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
        chosen=ancient("build/{model}/search.json"),
        states=ancient("build/{model}/measured/original.safetensors"),
        codes=ancient(PARTS("build/{model}/codes/{part}.safetensors")),
        waits=together(
            "build/{model}/search.receipt.json",
            "build/{model}/measured/original.receipt.json",
            PARTS("build/{model}/codes/{part}.receipt.json"),
        ),
    output:
        figures="build/{model}/measured/{point}.json",
        receipt="build/{model}/measured/{point}.receipt.json",
    log:
        "build/{model}/logs/measured_{point}.log",
    resources:
        mem_mb=MB("measured"),
    params:
        store=STORE,
        step="measured",
        point="{point}",
        tools=TOOLS["measured"],
    script:
        "../scripts/step.py"
