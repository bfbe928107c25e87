#!/usr/bin/env bash
# Commit what has changed to a branch of its own, and propose it as a pull request, or renew the one that
# is open:  scripts/propose.sh BRANCH TITLE
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: propose.sh BRANCH TITLE" >&2; exit 2; }
if git diff --quiet; then
  echo "nothing has changed"
  exit 0
fi
git switch --quiet --force-create "$1"
git -c user.name="github-actions[bot]" -c user.email="41898282+github-actions[bot]@users.noreply.github.com" \
  commit --quiet --all --message "$2"
git push --quiet --force origin "$1"
[ -n "$(gh pr list --head "$1" --json number --jq '.[].number')" ] \
  || gh pr create --head "$1" --title "$2" --body "Written by \`make renew\`."
