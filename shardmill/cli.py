"""`shardmill ...`: the command line. One file per command under `commands/`, registered here and nowhere else.

Exit codes: 0; 1 with one line on stderr when a command fails; 2 for a wrong command line; 130 after Ctrl-C, 143 after
SIGTERM. A traceback is shown only with `--traceback`. A command imports what is heavy when it runs, so that `--help`
comes at once.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from shardmill import __version__, interrupt
from shardmill.commands import (
    adapter,
    bench,
    chat,
    check,
    device,
    doctor,
    draft,
    generate,
    new,
    pipeline,
    programs,
    quality,
    release,
    serve,
)
from shardmill.evidence.folder import heed_limits
from shardmill.imports import quiet_coremltools, spare_imports
from shardmill.machine import CODE
from shardmill.printable import one_line

HELP = "Run, inspect, check and publish the Core ML programs that the pipeline builds for the Apple Neural Engine."
INTERRUPTED = "shardmill: interrupted"
OF_THE_PLACE = {  # errors that whoever named a file or a folder can mend
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
    errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG,
}  # fmt: skip
HINT = "(unexpected; `shardmill --traceback ...` shows where)"


class Commands(TyperGroup):
    """The group that turns errors into one line; typer would print a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of its work becomes one line and exit code 1, Ctrl-C exit code 130."""
        try:
            result = super().invoke(ctx)
            if interrupt.happened():
                raise KeyboardInterrupt  # a library has swallowed it
            return result
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, KeyboardInterrupt) or interrupt.happened():
                typer.echo(INTERRUPTED, err=True)
                raise typer.Exit(interrupt.exit_code()) from error
            if ctx.params["traceback"] or _belongs_to_typer(error):
                raise
            sys.stdout.flush()  # text streamed so far comes first, also where both streams are one file
            typer.echo(f"shardmill: {_described(error)}", err=True)
            raise typer.Exit(1) from error


def _belongs_to_typer(error: Exception) -> bool:
    return isinstance(error, typer.Exit | typer.Abort | TyperException | BrokenPipeError)


def _described(error: Exception) -> str:
    """Return what a person should read of an error."""
    text = one_line(error)
    if _is_expected(error):
        return text
    if isinstance(error, OSError) and error.errno in OF_THE_PLACE and error.filename:
        return one_line(f"{error.filename2 or error.filename}: {error.strerror}")
    return f"{type(error).__name__}: {text} {HINT}" if text else f"{type(error).__name__} {HINT}"


def _is_expected(error: Exception) -> bool:
    """Return whether the error was raised for a person to read: every class of such errors is ours."""
    return type(error).__module__.partition(".")[0] in CODE


def _show_version(wanted: bool) -> None:
    """Print the version and ends."""
    if wanted:
        typer.echo(f"shardmill {__version__}")
        raise typer.Exit()


app = typer.Typer(cls=Commands, help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before the command; `Commands.invoke` reads them."""
    heed_limits()


COMMANDS = (
    pipeline.init,
    new.new,
    new.lock,
    pipeline.plan,
    pipeline.families,
    generate.generate,
    chat.chat,
    serve.serve,
    check.check,
    programs.warm,
    generate.label,
    bench.bench,
    programs.inspect,
    programs.lint,
    quality.audit_range,
    release.verify,
    release.sign,
    release.publish,
    release.pull,
    release.rebuild,
    release.diff,
    pipeline.why,
    quality.why_quality,
    quality.witness,
    pipeline.gc,
    doctor.doctor,
    pipeline.synth_checkpoint,
    release.rotate,
    programs.compare_compiled,
    programs.diff_residency,
)
for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"))(command)
app.add_typer(adapter.app, name="adapter")
app.add_typer(device.app, name="device")
app.add_typer(draft.app, name="draft")


def main() -> None:
    """Run the `shardmill` command."""
    interrupt.ends_this_process(INTERRUPTED)
    spare_imports()
    with quiet_coremltools():
        app()
