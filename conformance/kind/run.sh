#!/usr/bin/env bash
# Run the upstream conformance suite of the Gateway API Inference Extension on a kind cluster, with
# Istio as the gateway and this repository's picker in the place of the suite's own.
#
#   conformance/kind/run.sh [--keep] [--only TEST] [--delete]
#
# --keep leaves the cluster running, and a later run uses it again; --delete only removes it;
# --only runs one test by its short name. Every step can be repeated. The report goes to
# conformance/reports/. Versions, and whose report it is, are variables below, and can be set from outside.
set -euo pipefail

CLUSTER=${CLUSTER:-pointsman-conformance}
# Of kind v0.30.0.
NODE_IMAGE=${NODE_IMAGE:-kindest/node:v1.34.0@sha256:7416a61b42b1662ca6ca89f02028ac133a309a2a30ba309614e8ec94d976dc5a}
# As the suite's go.mod has it.
GATEWAY_API_VERSION=${GATEWAY_API_VERSION:-v1.6.1}
SUITE_REPOSITORY=${SUITE_REPOSITORY:-https://github.com/kubernetes-sigs/gateway-api-inference-extension.git}
ISTIO_VERSION=${ISTIO_VERSION:-1.30.1}
METALLB_VERSION=${METALLB_VERSION:-v0.14.9}
IMAGE=${IMAGE:-pointsman-picker:conformance}
TIMEOUT=${TIMEOUT:-60m}
PYTHON=${PYTHON:-python3}
# What the report says of whoever made it; its address is left empty unless it is set.
ORGANIZATION=${ORGANIZATION:-pointsman}
PROJECT_URL=${PROJECT_URL:-}
CONTACT=${CONTACT:-pointsman}
WORK=${WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/pointsman/conformance}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
# The suite of the release that our definitions are of.
SUITE_VERSION=${SUITE_VERSION:-$(sed -n 's/.*bundle-version: //p' "$ROOT/crds/inference.networking.k8s.io_inferencepools.yaml")}
REPORT=$ROOT/conformance/reports/upstream-$SUITE_VERSION-istio-$ISTIO_VERSION.yaml
KUBECONFIG=$WORK/$CLUSTER.kubeconfig
export KUBECONFIG
keep=false
only=
missing=
delete=false

say() { printf '\n==> %s\n' "$*"; }

fail() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 2
}

read_arguments() {
  while [ $# -gt 0 ]; do
    case $1 in
      --keep) keep=true ;;
      --delete) delete=true ;;
      --only)
        [ $# -ge 2 ] || fail "--only needs the short name of a test"
        only=$2
        shift
        ;;
      -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
      *) fail "unknown argument '$1'; see --help" ;;
    esac
    shift
  done
}

need() {
  command -v "$1" >/dev/null 2>&1 || missing="$missing
  $1: $2"
}

check_tools() {
  missing=
  need docker "https://docs.docker.com/engine/install/"
  need kind "https://kind.sigs.k8s.io/docs/user/quick-start/#installation"
  need kubectl "https://kubernetes.io/docs/tasks/tools/"
  need go "https://go.dev/doc/install"
  need git "https://git-scm.com/downloads"
  need curl "https://curl.se/download.html"
  need tar "your system's packages"
  need "$PYTHON" "Python 3.11 or newer; PYTHON names another one"
  [ -z "$missing" ] || fail "these tools are needed and not on PATH:$missing"
  docker info >/dev/null 2>&1 || fail "docker does not answer: is its daemon running, and may you use it?"
  "$PYTHON" -c 'import yaml' 2>/dev/null || fail "$PYTHON has no PyYAML: pip install pyyaml, or PYTHON=.venv/bin/python"
}

remove_cluster() {
  say "removing the cluster $CLUSTER"
  kind delete cluster --name "$CLUSTER"
}

clean_up() {
  status=$?
  if [ "$keep" = true ]; then
    say "the cluster $CLUSTER stays; KUBECONFIG=$KUBECONFIG, and run.sh --delete removes it"
  else
    remove_cluster || true
  fi
  exit "$status"
}

make_cluster() {
  say "cluster $CLUSTER ($NODE_IMAGE)"
  if kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    kind export kubeconfig --name "$CLUSTER" --kubeconfig "$KUBECONFIG"
  else
    kind create cluster --name "$CLUSTER" --image "$NODE_IMAGE" --kubeconfig "$KUBECONFIG" \
      --config "$HERE/cluster.yaml" --wait 180s
  fi
}

give_addresses() {
  say "addresses for LoadBalancer Services (MetalLB $METALLB_VERSION)"
  kubectl apply -f "https://raw.githubusercontent.com/metallb/metallb/$METALLB_VERSION/config/manifests/metallb-native.yaml"
  kubectl -n metallb-system rollout status deployment/controller --timeout=180s
  kubectl -n metallb-system rollout status daemonset/speaker --timeout=180s
  gateway=$(docker network inspect kind \
    --format '{{range .IPAM.Config}}{{println .Gateway}}{{end}}' | grep -m1 '\.') \
    || fail "the docker network 'kind' has no IPv4 gateway"
  sed "s/PREFIX/${gateway%.*}/" "$HERE/address-pool.yaml" | retry kubectl_apply_stdin
}

kubectl_apply_stdin() { kubectl apply -f -; }

# Webhooks answer a little after their Pods are ready: try what is on stdin again for a while.
retry() {
  input=$(cat)
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    if printf '%s\n' "$input" | "$@"; then
      return 0
    fi
    sleep 3
  done
  fail "gave up: $*"
}

install_definitions() {
  say "Gateway API $GATEWAY_API_VERSION, and our definitions of the inference API"
  kubectl apply --server-side -f \
    "https://github.com/kubernetes-sigs/gateway-api/releases/download/$GATEWAY_API_VERSION/standard-install.yaml"
  for definition in "$ROOT"/crds/inference.networking.*.yaml; do
    kubectl apply --server-side -f "$definition"
    # The suite reports this as the version that was tested.
    kubectl annotate --overwrite -f "$definition" \
      "inference.networking.k8s.io/bundle-version=$SUITE_VERSION"
  done
  kubectl wait --for=condition=Established --timeout=60s \
    crd/inferencepools.inference.networking.k8s.io crd/gateways.gateway.networking.k8s.io
}

find_istioctl() {
  if command -v istioctl >/dev/null 2>&1 \
    && istioctl version --remote=false 2>/dev/null | grep -q "$ISTIO_VERSION"; then
    ISTIOCTL=$(command -v istioctl)
    return
  fi
  ISTIOCTL=$WORK/istioctl-$ISTIO_VERSION
  [ ! -x "$ISTIOCTL" ] || return 0
  case $(uname -s)-$(uname -m) in
    Linux-x86_64) system=linux-amd64 ;;
    Linux-aarch64) system=linux-arm64 ;;
    Darwin-arm64) system=osx-arm64 ;;
    Darwin-x86_64) system=osx-amd64 ;;
    *) fail "no istioctl $ISTIO_VERSION is known for $(uname -s) $(uname -m); put one on PATH" ;;
  esac
  say "fetching istioctl $ISTIO_VERSION"
  curl -fsSL "https://github.com/istio/istio/releases/download/$ISTIO_VERSION/istioctl-$ISTIO_VERSION-$system.tar.gz" \
    | tar -xz -C "$WORK" istioctl
  mv "$WORK/istioctl" "$ISTIOCTL"
}

install_gateway() {
  find_istioctl
  say "Istio $ISTIO_VERSION"
  "$ISTIOCTL" install -y --set profile=minimal \
    --set values.pilot.env.ENABLE_GATEWAY_API_INFERENCE_EXTENSION=true
  kubectl wait --for=condition=Accepted --timeout=120s gatewayclass/istio
  kubectl apply -f "$HERE/namespace.yaml"
  retry kubectl_apply_stdin <"$HERE/destination-rules.yaml"
}

load_picker() {
  say "the picker's image ($IMAGE)"
  docker build -f "$ROOT/deploy/docker/picker.Dockerfile" -t "$IMAGE" "$ROOT"
  kind load docker-image "$IMAGE" --name "$CLUSTER"
}

fetch_suite() {
  say "the suite ($SUITE_VERSION)"
  SUITE=$WORK/suite-$SUITE_VERSION
  if [ ! -d "$SUITE/.git" ]; then
    git clone --quiet --depth 1 --branch "$SUITE_VERSION" "$SUITE_REPOSITORY" "$SUITE.new"
    mv "$SUITE.new" "$SUITE"
  fi
  git -C "$SUITE" checkout --quiet -- conformance
  # Its manifests are compiled into the test binary: the picker has to be in them before that.
  "$PYTHON" "$HERE/put_picker.py" "$SUITE/conformance/resources/base.yaml" --image "$IMAGE" \
    --config "$HERE/picker-config.yaml" --output "$SUITE/conformance/resources/base.yaml"
}

run_suite() {
  say "building the suite's test binary"
  module=$SUITE
  package=./conformance
  if [ -f "$SUITE/conformance/go.mod" ]; then
    module=$SUITE/conformance
    package=.
  fi
  (cd "$module" && go test -c -o "$WORK/conformance.test" "$package")
  say "running the suite; this takes 10 to 20 minutes"
  mkdir -p "$(dirname "$REPORT")"
  set -- -test.run TestConformance -test.timeout "$TIMEOUT" -test.v \
    -gateway-class istio -report-output "$REPORT" \
    -organization "$ORGANIZATION" -project pointsman -url "$PROJECT_URL" \
    -version "$(git -C "$ROOT" describe --always --dirty)" -contact "$CONTACT"
  if [ -n "$only" ]; then
    set -- "$@" -run-test "$only"
  fi
  result=0
  (cd "$SUITE/conformance" && "$WORK/conformance.test" "$@") || result=$?
  [ ! -f "$REPORT" ] || say "report: $REPORT"
  return "$result"
}

read_arguments "$@"
mkdir -p "$WORK"
if [ "$delete" = true ]; then
  need kind "https://kind.sigs.k8s.io/docs/user/quick-start/#installation"
  [ -z "$missing" ] || fail "this tool is needed and not on PATH:$missing"
  remove_cluster
  exit 0
fi
check_tools
trap clean_up EXIT
trap 'exit 130' INT TERM
make_cluster
give_addresses
install_definitions
install_gateway
load_picker
fetch_suite
run_suite
