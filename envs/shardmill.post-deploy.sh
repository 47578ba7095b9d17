#!/usr/bin/env bash
# Snakemake runs this once, inside the new environment, for the library that the rules' scripts import. In a clone it is
# the clone's. In a folder that `shardmill init` made, and in workflows that use this one as a module, it is a wheel that
# SHARDMILL_WHEEL names: an address or a path, with the file's hash. No index is asked for it by name, since nobody has
# registered the name yet and whoever did could put anything there.
set -euo pipefail
if [ -f pyproject.toml ] && grep -q '^name = "shardmill"$' pyproject.toml; then
    exec python -m pip install --no-deps -c constraints.txt -e .
fi
case "${SHARDMILL_WHEEL:-}" in
*"#sha256="*) ;;
*)
    echo "shardmill: SHARDMILL_WHEEL must name the wheel to install, as file:///FOLDER/shardmill-0.1.0-py3-none-any.whl#sha256=HASH (docs/installing.md)" >&2
    exit 1
    ;;
esac
exec python -m pip install --no-deps --no-index "shardmill @ $SHARDMILL_WHEEL"
