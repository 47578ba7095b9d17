#!/usr/bin/env bash
# Snakemake runs this once, inside the new environment: the rules' scripts import the library of this checkout.
set -euo pipefail
python -m pip install --no-deps -c constraints.txt -e .
