#!/usr/bin/env bash
# Writes the documentation of the package's modules, a folder of web pages, by DocC: swift/scripts/docs.sh [FOLDER]
# On a Mac Xcode's "Build Documentation" does the same. TOOLS is the folder of swift-symbolgraph-extract and docc, if they
# are not on the PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${1:-.build/Shardmill.doccarchive}"
export PATH="${TOOLS:+$TOOLS:}$PATH"

swift build
modules="$(swift build --show-bin-path)/Modules"
triple="$(basename "$(dirname "$(dirname "$modules")")")"
symbols="$(mktemp -d)"
trap 'rm -rf "$symbols"' EXIT
for module in Shardmill ShardmillDecode ShardmillText ShardmillCoreML; do
  swift-symbolgraph-extract -module-name "$module" -I "$modules" -target "$triple" -minimum-access-level public \
    -output-dir "$symbols"
done
docc convert --fallback-display-name Shardmill --fallback-bundle-identifier org.shardmill \
  --additional-symbol-graph-dir "$symbols" --output-dir "$target"
echo "$target"
