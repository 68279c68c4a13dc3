#!/usr/bin/env bash
# Run `make test-cluster` on a new kind cluster of two workers, whose nodes have no zone labels, with images that
# are built here. The release workflow does the same before it publishes. Needs docker, kind, kubectl, make.
#
#   tests/cluster/kind.sh                 creates the cluster and removes it
#   KEEP=1 tests/cluster/kind.sh          keeps it: another run uses it again
#   tests/cluster/kind.sh --only rollout  passes arguments to the tests
set -euo pipefail
cd "$(dirname "$0")/../.."

name=triton-gateway-test
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' gateway/__init__.py)
images=("triton-gateway:$version" "triton-gateway-embedded:$version" "$(sed -n 's/^ *image: \(.*redis:.*\)/\1/p' k8s/components/redis-state/redis.yaml)")

remove() {
    [ -n "${KEEP:-}" ] || kind delete cluster --name "$name"
}

docker build --quiet --target gateway --tag "${images[0]}" .
docker build --quiet --target embedded --tag "${images[1]}" .
docker pull --quiet "${images[2]}"

trap remove EXIT
kind get clusters | grep -qx "$name" || kind create cluster --name "$name" --wait 180s --config - <<'KIND'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
KIND
kind load docker-image --name "$name" "${images[@]}"

make test-cluster CLUSTER_CONTEXT="kind-$name" IMAGES="redis=${images[2]}" \
    ARGS="--node-down 'docker kill {node}' --node-up 'docker start {node}' ${*@Q}"
