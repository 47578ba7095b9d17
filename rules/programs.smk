# From parts to programs.


# The host's embedding table.
rule embedding:
    input:
        part="build/{model}/parts/embedding.json",
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
    output:
        table="build/{model}/embedding.safetensors",
        receipt="build/{model}/embedding.receipt.json",
    log:
        "build/{model}/logs/embedding.log",
    priority: 3  # parity_stack waits for it, and two tables (Gemma 4) take as long as all layers
    resources:
        mem_mb=MB("embedding"),
    params:
        store=STORE,
        step="embedding",
        form=OF(options.option, "convert.embedding"),
        tools=TOOLS["embedding"],
    script:
        "../scripts/step.py"


# One part's Core ML package, the same bytes wherever it is made.
rule convert:
    input:
        part="build/{model}/parts/{part}.json",
        recipe=ancient("build/{model}/precision.json"),
        record=ancient("build/{model}/source.receipt.json"),
        beside=ancient(CHECKPOINT),
        codes=ancient(OF(sm.made_by, "codes")),
        waits=together(
            "build/{model}/precision.receipt.json",
            OF(sm.receipts_of, "codes"),
        ),
    output:
        package=new_folder(PACKAGE),
        receipt="build/{model}/packages/{part}.receipt.json",
    log:
        "build/{model}/logs/convert_{part}.log",
    priority: 2  # every gate waits for it
    resources:
        mem_mb=MB("convert"),
    params:
        store=STORE,
        step="convert",
        tools=TOOLS["convert"],
    script:
        "../scripts/step.py"


# The package as a device loads it: by Apple's compiler on a Mac, by the portable one elsewhere.
rule compile:
    input:
        package=ancient(PACKAGE),
        waits="build/{model}/packages/{part}.receipt.json",
    output:
        bundle=new_folder(BUNDLE),
        receipt="build/{model}/compiled/{part}.receipt.json",
    log:
        "build/{model}/logs/compile_{part}.log",
    priority: 2  # every gate waits for it
    resources:
        mem_mb=MB("compile"),
    params:
        store=STORE,
        step="compile",
        bundles=OF(options.option, "program.bundles"),
        engine=OF(options.engine),
        tools=TOOLS["compile"],
    script:
        "../scripts/step.py"
