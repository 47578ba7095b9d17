"""`shardmill compare-compiled`: do two compilers make the same bundle of a package?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.printable import one_line


def compare_compiled(
    first: Annotated[Path, typer.Argument(help="A compiled bundle, .mlmodelc.")],
    second: Annotated[Path, typer.Argument(help="Another bundle of the same package.")],
) -> None:
    """Show how two compiled bundles differ, apart from build information. Exit code 1 if they do."""
    from shardmill.quiet import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.files.compare import compare_compiled as compare

        differences = compare(first, second)  # coremltools is imported when a description is read
    for difference in differences:
        typer.echo(one_line(f"{difference.file}: {difference.what}"))
    typer.echo(f"{len(differences)} files differ")
    if differences:
        raise typer.Exit(1)
