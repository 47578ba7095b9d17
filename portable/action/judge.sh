#!/usr/bin/env bash
# Judges Core ML packages in CI: installs portable-coreml from this checkout into an environment of its own, judges, and
# exits as `portable-coreml judge` does. GitHub's Action runs it, and so can any other CI. It takes variables:
#
#   FILES      packages and bundles, or patterns such as models/**/*.mlpackage, separated by spaces or lines
#   LIMITS     a TOML file with systems, bounds and domains of inputs; may be empty
#   AGAINST    what each file is compared with; may be empty
#   SARIF      where the findings are written as SARIF; may be empty
#   SUMMARY    where a summary in Markdown is written; may be empty
#   PYTHON     the Python to use; python3
#   VENV       an environment that has portable-coreml already; by default a new one is made and removed again
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ -z "${FILES:-}" ]; then
  echo "judge.sh: FILES names no package; set it to a path or a pattern" >&2
  exit 2
fi

if [ -z "${VENV:-}" ]; then
  VENV="$(mktemp -d)"
  trap 'rm -rf "$VENV"' EXIT
  "${PYTHON:-python3}" -m venv "$VENV"
  # PyTorch's own index has builds for CPUs; the one on PyPI brings CUDA's libraries, which are not used.
  "$VENV/bin/pip" install --quiet --extra-index-url https://download.pytorch.org/whl/cpu "$here/.." "$here/../extra"
fi

arguments=()
[ -z "${LIMITS:-}" ] || arguments+=(--limits "$LIMITS")
[ -z "${AGAINST:-}" ] || arguments+=(--against "$AGAINST")
[ -z "${SARIF:-}" ] || arguments+=(--sarif "$SARIF")
[ -z "${SUMMARY:-}" ] || arguments+=(--markdown "$SUMMARY")
[ -z "${GITHUB_ACTIONS:-}" ] || arguments+=(--annotations)
set -f # portable-coreml expands patterns itself, ** too
code=0
"$VENV/bin/python" -m portable_coreml judge "${arguments[@]}" -- $FILES || code=$?
if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -n "${SUMMARY:-}" ] && [ -e "$SUMMARY" ]; then
  cat "$SUMMARY" >> "$GITHUB_STEP_SUMMARY"
fi
exit "$code"
