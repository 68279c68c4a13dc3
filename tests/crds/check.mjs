// Custom resources as a JSON list on standard input; what is wrong with them on standard error.
import { readFileSync } from "node:fs";
import { GRPCRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/GRPCRoute";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";
import { PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule";

const kinds = { GRPCRoute, HTTPRoute, ScaledObject, PodMonitor, PrometheusRule };

for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const Kind = kinds[resource.kind];
  if (Kind === undefined) {
    console.error(`${resource.kind}: no schema`);
    process.exitCode = 1;
    continue;
  }
  try {
    new Kind(resource).validate();
    if (new Kind({}).apiVersion !== resource.apiVersion) throw new Error(`not of ${resource.apiVersion}`);
  } catch (error) {
    console.error(`${resource.kind} ${resource.metadata?.name}: ${error.message}`);
    process.exitCode = 1;
  }
}
