# From a checkpoint to the parts that become programs.


# The checkpoint's files, linked into the build, each with its sha256.
use rule step as fetch with:
    input:
        waits=local(OF(options.source_files)),
    output:
        record="build/{model}/source.receipt.json",
        beside=CHECKPOINT,
    log:
        "build/{model}/logs/fetch.log",
    threads: 4  # hashing
    params:
        source=OF(options.section, "source"),
        drafter=OF(options.section, "drafter"),
        locked=OF(options.locked),
        tools=TOOLS["fetch"],


# The tensors of each part, read from headers; no weight is copied. Models with the same parts share a rule.
for same in alike(MODELS, "split"):

    rule:
        name:
            same.rule
        input:
            record="build/{model}/source.receipt.json",
            beside=ancient(CHECKPOINT),
            recipe=local(OF(options.recipe_files)),
        output:
            summary="build/{model}/plan.json",
            parts=expand("build/{{model}}/parts/{part}.json", part=[*same.parts, "embedding"]),
            receipt="build/{model}/plan.receipt.json",
        log:
            "build/{model}/logs/split.log",
        wildcard_constraints:
            model=any_of(same.models),
        threads: 4  # hashing
        resources:
            mem_mb=scheduling.memory(MODELS, workflow),
        params:
            settings=OF(options.split_settings),
            limits=OF(options.device_limits),
            tools=TOOLS["split"],
        script:
            "../scripts/step.py"
