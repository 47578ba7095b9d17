# shardmill: a Hugging Face checkpoint to gated Core ML programs.
#   snakemake --cores 4 all [--configfile configs/NAME.yaml]

from pathlib import Path

from snakemake.utils import min_version

from shardmill.pipeline import snakefile as sm

min_version("9.27")

sm.only_its_jobs("build", workflow)
sm.use_own_solver()

if not workflow.configfiles:

    configfile: sm.default_config()


MODELS = sm.checked(config, workflow)
OF = sm.of(MODELS)  # applies a function to the config of a job's model
PARTS = sm.parts_of(MODELS)
TOOLS = sm.tools(MODELS, workflow)
MB = sm.mem_mb(MODELS, workflow)
STORE = "build/.store"
sm.limit_ane(workflow)
PACKAGE = sm.folder("build/{model}/packages/{part}.mlpackage", workflow)
BUNDLE = sm.folder("build/{model}/compiled/{part}.mlmodelc", workflow)
PLOTS = sm.folder("build/{model}/plots", workflow)
CHECKPOINT = sm.checkpoint(workflow)


wildcard_constraints:
    model=MODELS.names("model"),
    part=MODELS.names("part"),
    point=MODELS.names("point"),


report: "report/workflow.rst"


include: "rules/source.smk"
include: "rules/precision.smk"
include: "rules/programs.smk"
include: "rules/gates.smk"
include: "rules/outcome.smk"


onstart:
    sm.only_build("build")
    sm.demand_room(MODELS, workflow)
    sm.tell_jobs(MODELS)
    sm.go_on(MODELS, workflow)
    sm.start_without_delay(workflow)


onsuccess:
    sm.sum_up(MODELS, workflow)


onerror:
    sm.sum_up(MODELS, workflow)


rule all:
    default_target: True
    input:
        sm.artifacts(MODELS, workflow),


# A config of a batch that can't be built. No file is made, so every run reports the config and fails.
rule refused:
    output:
        "build/refused/{config}",
    log:
        "build/refused/{config}.log",
    wildcard_constraints:
        config=sm.any_of(MODELS.refusals),
    localrule: True
    conda:
        "envs/shardmill.yaml"
    params:
        line=lambda wildcards: MODELS.refusals[wildcards.config],
    shell:
        "echo shardmill: {params.line:q} | tee {log} >&2; exit 1"
