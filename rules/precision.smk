# From a calibration text to the form of each matrix. Without calibration, only the rule `precision` runs.


# Transformers' hidden states for the calibration text, at the edges of parts.
use rule step as calibration with:
    input:
        **made_by(rules.fetch),
        summary="build/{model}/plan.json",
        text=local(OF(options.calibration_files)),
    output:
        edges="build/{model}/calibration.safetensors",
        receipt="build/{model}/calibration.receipt.json",
    log:
        "build/{model}/logs/calibration.log",
    params:
        settings=OF(options.calibration_settings),
        tools=TOOLS["calibration"],


# The codes that a quantiser chooses for a part's matrices.
use rule step as codes with:
    input:
        **made_by(rules.fetch, rules.calibration),
        part="build/{model}/parts/{part}.json",
        summary="build/{model}/plan.json",
    output:
        codes="build/{model}/codes/{part}.safetensors",
        receipt="build/{model}/codes/{part}.receipt.json",
    log:
        "build/{model}/logs/codes_{part}.log",
    priority: 2  # conversion waits for it
    params:
        forms=OF(options.coded_forms),
        tools=TOOLS["codes"],


# What each matrix of a part costs by itself.
use rule step as sensitivity with:
    input:
        **made_by(rules.fetch, rules.calibration, rules.codes),
        part="build/{model}/parts/{part}.json",
        summary="build/{model}/plan.json",
    output:
        costs="build/{model}/sensitivity/{part}.json",
        receipt="build/{model}/sensitivity/{part}.receipt.json",
    log:
        "build/{model}/logs/sensitivity_{part}.log",
    priority: 2  # conversion waits for it
    threads: matrices_at_once
    params:
        tools=TOOLS["sensitivity"],


# The forms that a budget buys.
use rule step as search with:
    input:
        **made_by(rules.sensitivity, every="part"),
        parts=PARTS("build/{model}/parts/{part}.json"),
    output:
        chosen="build/{model}/search.json",
        receipt="build/{model}/search.receipt.json",
    log:
        "build/{model}/logs/search.log",
    params:
        settings=OF(options.search_settings),
        tools=TOOLS["search"],


# In which form each matrix is stored.
use rule step as precision with:
    input:
        **made_by(perhaps(rules.search)),
        parts=PARTS("build/{model}/parts/{part}.json"),
        source=local(OF(options.recipe_files)),
    output:
        recipe="build/{model}/precision.json",
        receipt="build/{model}/precision.receipt.json",
    log:
        "build/{model}/logs/precision.log",
    params:
        precision=OF(options.option, "convert.precision"),
        towers=OF(options.tower_form),
        tools=TOOLS["precision"],


# Transformers' results for a text that neither quantisers nor the search have seen.
use rule aside as original with:
    input:
        **made_by(rules.fetch),
        summary="build/{model}/plan.json",
        text=local(OF(options.calibration_files)),
    output:
        states="build/{model}/measured/original.safetensors",
        receipt="build/{model}/measured/original.receipt.json",
    log:
        "build/{model}/logs/original.log",
    priority: 3  # reports a text that is too short before hours of other work
    params:
        settings=OF(options.measured_settings),
        tools=TOOLS["original"],


# What a set of forms costs on that text; only the report waits for this rule.
use rule aside as measured with:
    input:
        **made_by(rules.fetch, rules.search, rules.original, rules.codes, every="part"),
        summary="build/{model}/plan.json",
        parts=PARTS("build/{model}/parts/{part}.json"),
    output:
        figures="build/{model}/measured/{point}.json",
        receipt="build/{model}/measured/{point}.receipt.json",
    log:
        "build/{model}/logs/measured_{point}.log",
    params:
        point="{point}",
        tools=TOOLS["measured"],
