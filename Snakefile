# shardmill: a Hugging Face checkpoint to gated Core ML programs.
#   snakemake --cores 4 all [--configfile configs/NAME.yaml]

from snakemake.utils import min_version

from shardmill.pipeline.resolve import default_config

min_version("9.27")

if not workflow.configfiles:

    configfile: default_config()


report: "report/workflow.rst"


include: "rules/common.smk"
include: "rules/source.smk"
include: "rules/precision.smk"
include: "rules/programs.smk"
include: "rules/gates.smk"
include: "rules/outcome.smk"


MODELS = scheduling.that_fit(MODELS, workflow)


onstart:
    sm.only_build("build")
    sm.lock(MODELS, workflow)
    scheduling.demand_room(MODELS, workflow)
    tell_jobs(MODELS)
    scheduling.go_on(MODELS, workflow)
    scheduling.start_without_delay(workflow)
    fork_server.start(workflow)


onsuccess:
    terminal.end(MODELS)
    sum_up(MODELS, workflow)


onerror:
    terminal.end()
    sum_up(MODELS, workflow)
    advice.advise(MODELS, workflow)


rule all:
    default_target: True
    input:
        sm.finished(
            MODELS,
            *(
                rules.fetch,
                rules.embedding,
                rules.convert,
                rules.compile,
                rules.manifest,
                rules.provenance,
                rules.report,
            ),
        ),
        lambda wildcards: sm.alone("build", workflow),
        lambda wildcards: sm.lock(MODELS, workflow),
        lambda wildcards: sm.mend(MODELS, workflow),


# A config of a batch that can't be built. No file is made, so every run reports the config and fails.
rule refused:
    output:
        "build/refused/{config}",
    log:
        "build/refused/{config}.log",
    wildcard_constraints:
        config=any_of(MODELS.refusals),
    localrule: True
    params:
        line=lambda wildcards: MODELS.refusals[wildcards.config],
    shell:
        "echo shardmill: {params.line:q} | tee {log} >&2; exit 1"
