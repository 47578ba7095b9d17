#!/usr/bin/env bash
# Snakemake runs this once, inside the new environment: the rules' scripts import the library of this checkout or, in a
# folder that `shardmill init` made and in workflows that use this one as a module, the published one.
set -euo pipefail
if [ -f pyproject.toml ] && grep -q '^name = "shardmill"$' pyproject.toml; then
    python -m pip install --no-deps -c constraints.txt -e . -e ./portable
else
    python -m pip install --no-deps shardmill==0.1.0 portable-coreml==0.1.0
fi
