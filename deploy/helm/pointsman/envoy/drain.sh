#!/usr/bin/env bash
# The preStop of an Envoy: ask its clients to go elsewhere, and return once nothing is under way any more.
#
#   drain.sh [LIMIT_SECONDS [QUIET_SECONDS [ADMIN_PORT]]]
#
# It returns after LIMIT_SECONDS (100) whatever is under way, and not before QUIET_SECONDS (10): until then
# clients may come that have not heard that this pod goes away. Envoy's image has bash, but neither curl nor wget.
set -euo pipefail
limit_seconds="${1:-100}"
quiet_seconds="${2:-10}"
admin_port="${3:-9901}"

ask() { # METHOD PATH: prints the whole answer
  local connection
  exec {connection}<>"/dev/tcp/127.0.0.1/${admin_port}"
  printf '%s %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n' \
    "$1" "$2" >&"${connection}"
  cat <&"${connection}"
  exec {connection}>&-
}

active() { # prints how many requests are under way
  local answer
  answer="$(ask GET '/stats?filter=^http\.ingress\.downstream_rq_active$')"
  [[ "${answer}" =~ downstream_rq_active:\ ([0-9]+) ]] && printf '%s' "${BASH_REMATCH[1]}"
}

ask POST '/drain_listeners?graceful&skip_exit' >/dev/null
while ((SECONDS < limit_seconds)); do
  if ((SECONDS >= quiet_seconds)) && [[ "$(active)" == 0 ]]; then
    exit 0
  fi
  sleep 0.25
done
