# shardmill: a Hugging Face checkpoint to gated Core ML programs.
#   snakemake --cores 4 all [--configfile configs/NAME.yaml]

from pathlib import Path

from snakemake.utils import min_version

from shardmill.pipeline import options, scheduling
from shardmill.pipeline import snakefile as sm
from shardmill.pipeline.batch import alike, any_of, of, parts_of, sum_up, tell_jobs, together
from shardmill.pipeline.resolve import default_config
from shardmill.pipeline.resources import every_core, matrices_at_once
from shardmill.pipeline.storage import checkpoint_input, folder, new_folder

min_version("9.27")

sm.only_its_jobs("build", workflow)
scheduling.use_own_solver()

if not workflow.configfiles:

    configfile: default_config()


MODELS = sm.checked(config, workflow)
OF = of(MODELS)  # applies a function to the config of a job's model
PARTS = parts_of(MODELS)
TOOLS = sm.tools(MODELS, workflow)
MB = scheduling.mem_mb(MODELS, workflow)
STORE = "build/.store"
scheduling.limit_ane(workflow)
scheduling.say_in_one_line()
PACKAGE = folder("build/{model}/packages/{part}.mlpackage", workflow)
BUNDLE = folder("build/{model}/compiled/{part}.mlmodelc", workflow)
PLOTS = folder("build/{model}/plots", workflow)
CHECKPOINT = checkpoint_input(workflow)


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
    scheduling.demand_room(MODELS, workflow)
    tell_jobs(MODELS)
    scheduling.go_on(MODELS, workflow)
    scheduling.start_without_delay(workflow)


onsuccess:
    sum_up(MODELS, workflow)


onerror:
    sum_up(MODELS, workflow)


rule all:
    default_target: True
    input:
        sm.artifacts(MODELS, workflow),
        lambda wildcards: sm.alone("build", workflow),
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
