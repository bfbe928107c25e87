#!/usr/bin/env bash
# Make one image of those of both kinds of CPU, whose digests are in the files of a folder; tag and sign it:
#   scripts/tag-image.sh FOLDER IMAGE TAG
# Prints `digest=…` for the steps that follow; everything else goes to stderr.
set -euo pipefail
[ $# -eq 3 ] || { echo "usage: tag-image.sh FOLDER IMAGE TAG" >&2; exit 2; }
files=("$1"/*)
[ ${#files[@]} -eq 2 ] || { echo "$1 has not the digests of two images" >&2; exit 2; }
parts=()
for file in "${files[@]}"; do
  parts+=("$2@$(<"$file")")
done
docker buildx imagetools create --tag "$2:$3" "${parts[@]}" >&2
digest=$(docker buildx imagetools inspect "$2:$3" --format '{{.Manifest.Digest}}')
cosign sign --yes "$2@$digest" >&2
echo "digest=$digest"
