# shardmill: a Hugging Face checkpoint to gated Core ML programs.
#   snakemake --cores 4 all [--configfile configs/NAME.yaml]

from pathlib import Path

from snakemake.utils import min_version

from shardmill.pipeline import snakefile as sm

min_version("9.27")

sm.only_its_jobs("build", workflow)

if not workflow.configfiles:

    configfile: sm.default_config()


C = sm.checked(config, workflow)
TOOLS = sm.tools(C)
MB = sm.mem_mb(C, workflow)
STORE = "build/.store"


wildcard_constraints:
    model=C.model,
    part="|".join(C.parts),
    point="|".join(C.points) or "none",


report: "report/workflow.rst"


include: "rules/source.smk"
include: "rules/precision.smk"
include: "rules/programs.smk"
include: "rules/gates.smk"
include: "rules/outcome.smk"


onstart:
    sm.only_build("build")


rule all:
    default_target: True
    input:
        expand(sm.artifacts(C), model=C.model),
