# What all rules share: the models of this run, the rule that they inherit from, and how they name what others make.

from functools import partial

from shardmill.pipeline import advice, fork_server, made, options, scheduling, terminal
from shardmill.pipeline import snakefile as sm
from shardmill.pipeline.batch import alike, any_of, of, parts_of, sum_up, tell_jobs, together
from shardmill.pipeline.made import perhaps, verdict
from shardmill.pipeline.resources import every_core, matrices_at_once
from shardmill.pipeline.storage import checkpoint_input, folder, new_folder

sm.only_its_jobs("build", workflow)
scheduling.use_own_solver()
scheduling.limit_ane(workflow)
scheduling.say_in_one_line()
MODELS = sm.checked(config, workflow)
sm.say_unlocked(MODELS, workflow)
terminal.take_over(MODELS, workflow)
OF = of(MODELS)  # applies a function to the config of a job's model
PARTS = parts_of(MODELS)
TOOLS = sm.tools(MODELS, workflow)
PACKAGE = folder("build/{model}/packages/{part}.mlpackage", workflow)
BUNDLE = folder("build/{model}/compiled/{part}.mlmodelc", workflow)
PLOTS = folder("build/{model}/plots", workflow)
CHECKPOINT = checkpoint_input(workflow)
made_by = partial(made.made_by, MODELS)  # a rule's inputs from other rules
files_of = partial(made.files_of, MODELS)
receipts_of = partial(made.receipts_of, MODELS)


wildcard_constraints:
    model=MODELS.names("model"),
    part=MODELS.names("part"),
    point=MODELS.names("point"),


# Every rule of a step is this one with files of its own. The script does the step that the rule is named after.
rule step:
    resources:
        mem_mb=scheduling.memory(MODELS, workflow),
    script:
        "../scripts/step.py"


# A step that runs programs, by Core ML on a Mac: one such job at a time uses the Neural Engine.
use rule step as engine_step with:
    resources:
        mem_mb=scheduling.memory(MODELS, workflow),
        ane=1,
    params:
        engine=OF(options.engine),


# A step whose result model.json does not cover: it comes after model.json, or only the report shows it.
use rule step as aside with:
    params:
        aside=True,
