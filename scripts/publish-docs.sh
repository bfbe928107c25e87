#!/usr/bin/env bash
# Publish the site of a branch or of a tag `v…` to the branch gh-pages of `origin`:
#   scripts/publish-docs.sh REF MIKE
# Patches of a minor version replace each other; pre-releases are not `latest`.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: publish-docs.sh REF MIKE" >&2; exit 2; }
git config user.name "github-actions[bot]"
git config user.email "41898282+github-actions[bot]@users.noreply.github.com"
if git ls-remote --exit-code --quiet origin gh-pages >/dev/null; then
  git fetch --quiet --depth=1 origin gh-pages:gh-pages
fi
if [[ $1 =~ ^v([0-9]+\.[0-9]+)\.[0-9]+$ ]]; then
  "$2" deploy --push --update-aliases "${BASH_REMATCH[1]}" latest
  "$2" set-default --push latest
elif [[ $1 =~ ^v([0-9]+\.[0-9]+)\. ]]; then
  "$2" deploy --push "${BASH_REMATCH[1]}"
else
  "$2" deploy --push "$1"
fi
