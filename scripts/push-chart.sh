#!/usr/bin/env bash
# Push the chart of a folder to a registry that docker is logged in to, and sign it:
#   scripts/push-chart.sh FOLDER REGISTRY/PATH
# Prints `digest=…` for the steps that follow; everything else goes to stderr.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: push-chart.sh FOLDER REGISTRY/PATH" >&2; exit 2; }
archives=("$1"/*.tgz)
[ ${#archives[@]} -eq 1 ] && [ -f "${archives[0]}" ] || { echo "$1 has not one chart" >&2; exit 2; }
output=$(helm push "${archives[0]}" "oci://$2" 2>&1)
echo "$output" >&2
digest=$(sed -n 's/^Digest: \(sha256:[0-9a-f]\{64\}\)$/\1/p' <<<"$output")
[ -n "$digest" ] || { echo "helm has printed no digest" >&2; exit 1; }
cosign sign --yes "$2/pointsman@$digest" >&2
echo "digest=$digest"
