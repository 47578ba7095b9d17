"""The jobs of a build, from Snakemake's own DAG: for whoever looks at jobs that Snakemake is not running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardmill.config import Config
from shardmill.files import write_json
from shardmill.pipeline.job import BESIDE, OWN, as_files, flat, given
from shardmill.pipeline.made import each, of_steps, values
from shardmill.pipeline.needs import STEPS, Step, step_of
from shardmill.pipeline.options import settings
from shardmill.pipeline.resolve import workflow_root
from shardmill.pipeline.snakefile import BUILDS

OF_THE_JOB = ("tools", "aside")  # parameters that a rule gives to the job, not to the step's function


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        model: the model's name.
        step: the step.
        one: the job's part or point; empty for a job without one.
        inputs: files by name, as the rule names them from the working folder.
        outputs: files by name.
        params: the parameters of the step's function.
    """

    model: str
    step: Step
    one: str
    inputs: Mapping[str, Path | list[Path]]
    outputs: Mapping[str, Path | list[Path]]
    params: Mapping[str, Any]

    def arguments(self, build: Path) -> dict[str, Any]:
        """Return what the step's function gets, where the build's files lie in the folder `build`."""
        return given(self._placed(self.inputs, build)) | dict(self.params)

    def results(self, build: Path) -> dict[str, Path]:
        """Return the paths of the outputs in the folder `build`, see `job.flat`; without the receipt."""
        made = {name: path for name, path in self.outputs.items() if name not in (OWN, BESIDE)}
        return flat(self._placed(made, build))

    @property
    def receipt(self) -> str:
        """Return the path of the receipt in the build's folder; empty if the store does not keep the result."""
        receipt = self.outputs.get(OWN)
        return receipt.relative_to(f"{BUILDS}/{self.model}").as_posix() if isinstance(receipt, Path) else ""

    def read(self) -> list[str]:
        """Return the paths in the build's folder of all files that the job reads or waits for."""
        build = f"{BUILDS}/{self.model}"
        paths = [path for files in self.inputs.values() for path in (files if isinstance(files, list) else [files])]
        return [path.relative_to(build).as_posix() for path in paths if path.is_relative_to(build)]

    def _placed(self, files: Mapping[str, Path | list[Path]], build: Path) -> dict[str, Path | list[Path]]:
        of_build = f"{BUILDS}/{self.model}"

        def placed(path: Path) -> Path:
            return build / path.relative_to(of_build) if path.is_relative_to(of_build) else path

        return {
            name: [placed(path) for path in paths] if isinstance(paths, list) else placed(paths)
            for name, paths in files.items()
        }


def planned(config: Config) -> list[Job]:
    """Return the jobs of a model's whole build, each after the jobs whose outputs it reads, as Snakemake plans them.

    Snakemake takes the Snakefile of the working folder, or the workflow that came with this library.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        write_json(file, settings(config))
        return jobs_of(planning(file), config)


def jobs_of(workflow: Any, config: Config) -> list[Job]:
    """Return the jobs of a model in the DAG of Snakemake's workflow, in the order of the rules, parts and points."""
    rules = [rule.name for rule in of_steps(workflow)]
    placed: list[tuple[int, int, Job]] = []
    for job in workflow.dag.jobs:
        if job.rule.name not in rules:
            continue  # all, and what a workflow has that has this one as a module
        wildcard = each(job.rule)
        one = job.wildcards_dict[wildcard] if wildcard else ""
        params = {name: value for name, value in job.params.items() if name not in OF_THE_JOB}
        step = STEPS[step_of(job.rule.name)]
        made = Job(config.model, step, one, as_files(job.input), as_files(job.output), params)
        placed.append((rules.index(job.rule.name), values(config, wildcard).index(one) if one else 0, made))
    return [job for _, _, job in sorted(placed, key=lambda row: row[:2])]


def planning(configfile: Path) -> Any:
    """Return Snakemake's workflow of a config, with the DAG of its target `all`. Nothing is run."""
    from snakemake.api import SnakemakeApi
    from snakemake.settings.enums import Quietness
    from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings

    local = Path("Snakefile")
    with SnakemakeApi(OutputSettings(dryrun=True, quiet={Quietness.ALL})) as api:
        workflow_api = api.workflow(
            ResourceSettings(cores=1),
            ConfigSettings(configfiles=[configfile]),
            snakefile=local if local.is_file() else workflow_root() / local,
            workdir=Path(),
        )
        workflow = workflow_api._workflow  # has read the Snakefile
        workflow.dag_settings = workflow_api.dag().dag_settings
        workflow._prepare_dag(forceall=False, ignore_incomplete=True, lock_warn_only=True, nolock=True)
        workflow._build_dag()
    return workflow
