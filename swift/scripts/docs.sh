#!/usr/bin/env bash
# Writes the documentation of the package's modules, a folder of web pages, by DocC: swift/scripts/docs.sh [FOLDER]
# On a Mac Xcode's "Build Documentation" does the same. A word that DocC does not understand is an error.
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${1:-.build/Shardmill.doccarchive}"
docc="$(command -v docc || xcrun --find docc)"

swift package dump-symbol-graph --minimum-access-level public --skip-synthesized-members
graphs="$(dirname "$(swift build --show-bin-path)")/symbolgraph"
symbols="$(mktemp -d)"
trap 'rm -rf "$symbols"' EXIT
cp "$graphs"/Shardmill{,@*,Decode,Text}.symbols.json "$symbols"  # nothing of the other modules is public
"$docc" convert --warnings-as-errors --fallback-display-name Shardmill --fallback-bundle-identifier org.shardmill \
  --additional-symbol-graph-dir "$symbols" --output-dir "$target"
echo "$target"
