# From parts to programs, and what these are compared with.


# Transformers' hidden states for the parity text, with the original weights.
use rule step as reference with:
    input:
        **made_by(rules.fetch),
        summary="build/{model}/plan.json",
        text=local(OF(options.option, "parity.text")),
    output:
        states="build/{model}/reference.safetensors",
        receipt="build/{model}/reference.receipt.json",
    log:
        "build/{model}/logs/reference.log",
    priority: 2  # every parity gate waits for it
    params:
        parity=OF(options.section, "parity"),
        tools=TOOLS["reference"],


# The host's embedding table.
use rule step as embedding with:
    input:
        **made_by(rules.fetch),
        part="build/{model}/parts/embedding.json",
    output:
        table="build/{model}/embedding.safetensors",
        receipt="build/{model}/embedding.receipt.json",
    log:
        "build/{model}/logs/embedding.log",
    priority: 3  # parity_stack waits for it, and two tables (Gemma 4) take as long as all layers
    params:
        form=OF(options.option, "convert.embedding"),
        tools=TOOLS["embedding"],


# One part's Core ML package, the same bytes wherever it is made.
use rule step as convert with:
    input:
        **made_by(rules.fetch, rules.precision, perhaps(rules.codes)),
        part="build/{model}/parts/{part}.json",
    output:
        package=new_folder(PACKAGE),
        receipt="build/{model}/packages/{part}.receipt.json",
    log:
        "build/{model}/logs/convert_{part}.log",
    priority: 2  # every gate waits for it
    params:
        tools=TOOLS["convert"],


# What the programs must give for inputs that any machine can make, which `shardmill check` compares.
use rule step as expected with:
    input:
        **made_by(rules.fetch, rules.reference, rules.convert, rules.embedding, every="part"),
        summary="build/{model}/plan.json",
        parts=PARTS("build/{model}/parts/{part}.json", "embedding"),
    output:
        expected="build/{model}/expected.safetensors",
        receipt="build/{model}/expected.receipt.json",
    log:
        "build/{model}/logs/expected.log",
    params:
        tools=TOOLS["expected"],


# The package as a device loads it: by Apple's compiler on a Mac, by the portable one elsewhere.
use rule step as compile with:
    input:
        **made_by(rules.convert),
    output:
        bundle=new_folder(BUNDLE),
        receipt="build/{model}/compiled/{part}.receipt.json",
    log:
        "build/{model}/logs/compile_{part}.log",
    priority: 2  # every gate waits for it
    params:
        bundles=OF(options.option, "program.bundles"),
        engine=OF(options.engine),
        tools=TOOLS["compile"],
