{{/* Name of an object; the argument is a list of the root context and the name without fullnameOverride. */}}
{{- define "triton-gateway.name" -}}
{{- $override := (index . 0).Values.fullnameOverride -}}
{{- $name := index . 1 -}}
{{- if not $override }}{{ $name }}
{{- else if hasPrefix "triton-gateway" $name }}{{ $override }}{{ trimPrefix "triton-gateway" $name }}
{{- else }}{{ $override }}-{{ $name }}
{{- end -}}
{{- end -}}

{{/* Labels that select pods: with fullnameOverride, those of this release. The arguments are those of the labels. */}}
{{- define "triton-gateway.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
{{- if $root.Values.fullnameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end }}
{{- end -}}

{{/* Labels of pods; the argument is a list of the root context, the component's name and its values. */}}
{{- define "triton-gateway.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "triton-gateway.selector" . }}
{{- with merge (dict) ((index . 2).podLabels) $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of an object; the argument is a list of the root context and the component's name. */}}
{{- define "triton-gateway.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/part-of: triton-gateway
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Reference of an image; the argument is a list of its values and the default tag. */}}
{{- define "triton-gateway.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end -}}

{{/* Name of an item of `models`. */}}
{{- define "triton-gateway.modelName" -}}
{{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end -}}

{{- define "triton-gateway.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Placement of pods; the argument is a list of the root context, the component's name and its values. */}}
{{- define "triton-gateway.placement" -}}
{{- $values := index . 2 -}}
{{- $isRedis := eq (index . 1) "redis" -}}
topologySpreadConstraints:
{{- with $values.topologySpreadConstraints }}
{{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "triton-gateway.selector" . | nindent 8 }}
    {{- if not $isRedis }}
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- else }}
{{- if not $isRedis }}
# No second constraint for zones: the scheduler ignores every node without the label of any of them, so that where
# nodes have no zones it would not spread the pods at all. The term for nodes outweighs that for zones.
# matchLabelKeys: the pods of the previous revision, which end soon, must not push the new ones together.
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- $selector := include "triton-gateway.selector" . }}
      {{- range $key, $weight := dict "kubernetes.io/hostname" 100 "topology.kubernetes.io/zone" 50 }}
      - weight: {{ $weight }}
        podAffinityTerm:
          topologyKey: {{ $key }}
          labelSelector:
            matchLabels: {{- $selector | nindent 14 }}
          matchLabelKeys: [pod-template-hash]
      {{- end }}
{{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The paths of the Ingress, as regular expressions of ingress-nginx. */}}
{{- define "triton-gateway.ingressPaths" -}}
- {path: "/v1/models$", pathType: ImplementationSpecific}
- {path: "/v1/models/[^/]+(/(versions|labels)/[^/]+)?(/infer|:predict|/jobs|/metadata|/openapi[.]json)$", pathType: ImplementationSpecific}
- {path: "/v1/(embeddings|rerank|completions|chat/completions)$", pathType: ImplementationSpecific}
- {path: "/v1/jobs(/[^/]+(/result)?)?$", pathType: ImplementationSpecific}
- {path: "/v2(/models)?$", pathType: ImplementationSpecific}
- {path: "/v2/models/[^/]+(/versions/[^/]+)?(/(infer|generate|generate_stream|ready|config|stats))?$", pathType: ImplementationSpecific}
- {path: "/v2/health/(live|ready)$", pathType: ImplementationSpecific}
- {path: "/(docs(/[^/]+)*|openapi[.]json)$", pathType: ImplementationSpecific}
{{- end -}}

{{/* The parentRefs of the routes with the fields that the server adds. */}}
{{- define "triton-gateway.parentRefs" -}}
{{- $references := list -}}
{{- range .Values.gatewayApi.parentRefs -}}
{{- $references = append $references (merge (dict) . (dict "group" "gateway.networking.k8s.io" "kind" "Gateway")) -}}
{{- end -}}
{{ toYaml $references }}
{{- end -}}

{{/* The backend of a route with the fields that the server adds; the argument is a list of the root context and the port. */}}
{{- define "triton-gateway.backendRef" -}}
{group: "", kind: Service, name: {{ include "triton-gateway.name" (list (index . 0) "triton-gateway") }}, port: {{ index . 1 }}, weight: 1}
{{- end -}}

{{/* Egress rule for DNS at any address. */}}
{{- define "triton-gateway.dns" -}}
- ports:
    {{- range .Values.networkPolicy.dnsPorts }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* "true" if Triton reads its models from a store in the network. */}}
{{- define "triton-gateway.remote" -}}
{{- if and (not .Values.triton.cpuOnly.enabled) (has .Values.triton.repository.type (list "s3" "gcs" "azure")) }}true{{ end -}}
{{- end -}}

{{- define "triton-gateway.urls" -}}
{{- if .Values.triton.enabled }}dns+http://{{ include "triton-gateway.name" (list . "triton") }}:8000?prefer={{ include "triton-gateway.name" (list . "triton-ready") }}{{ else }}{{ .Values.triton.urls }}{{ end -}}
{{- end -}}

{{/* "true" if the gateways write to the claim of the models. */}}
{{- define "triton-gateway.uploads" -}}
{{- $triton := .Values.triton -}}
{{- if and $triton.enabled (not $triton.cpuOnly.enabled) (eq $triton.repository.type "pvc") (ne $triton.repository.uploads "off") }}true{{ end -}}
{{- end -}}

{{/* What the values make the gateways connect to, apart from Triton, DNS and the chart's Redis: a JSON list. */}}
{{- define "triton-gateway.destinations" -}}
{{- $found := list -}}
{{- if .Values.redis.externalUrl }}{{ $found = append $found "redis.externalUrl" }}{{ end -}}
{{- $settings := .Values.gateway.settings -}}
{{- range $name := list "GATEWAY_OPENAI_URLS" "GATEWAY_OTLP_ENDPOINT" -}}
{{- if get $settings $name }}{{ $found = append $found $name }}{{ end -}}
{{- end -}}
{{- range $name, $scheme := dict "GATEWAY_REPOSITORY" "s3://" "GATEWAY_STATE" "redis" -}}
{{- if hasPrefix $scheme (get $settings $name) }}{{ $found = append $found $name }}{{ end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Values that the schema cannot check, because they depend on each other. */}}
{{- define "triton-gateway.check" -}}
{{- $gateway := .Values.gateway -}}
{{- $triton := .Values.triton -}}
{{- $settings := $gateway.settings -}}
{{- range $name := list "GATEWAY_TRITON_URLS" "GATEWAY_MODELS_FILE" "GATEWAY_KEYS_FILE" "GATEWAY_GRPC_PORT" -}}
{{- if hasKey $settings $name }}{{ fail (printf "gateway.settings.%s is set by the chart; use triton.urls, models and keys" $name) }}{{ end -}}
{{- end -}}
{{- $stop := add $gateway.preStopSeconds (int (get $settings "GATEWAY_DRAIN_S" | default 10)) (int (get $settings "GATEWAY_SHUTDOWN_S" | default 30)) -}}
{{- if le (int $gateway.terminationGracePeriodSeconds) (int $stop) -}}
{{ fail (printf "gateway.terminationGracePeriodSeconds must exceed preStopSeconds + GATEWAY_DRAIN_S + GATEWAY_SHUTDOWN_S = %d" (int $stop)) }}
{{- end -}}
{{- if le (int $triton.terminationGracePeriodSeconds) (int (add $triton.preStopSeconds $triton.exitTimeoutSeconds)) -}}
{{ fail "triton.terminationGracePeriodSeconds must exceed triton.preStopSeconds + triton.exitTimeoutSeconds" }}
{{- end -}}
{{- $many := or $gateway.autoscaling.enabled (gt (int $gateway.replicas) 1) -}}
{{- $state := get $settings "GATEWAY_STATE" -}}
{{- $shared := or (eq $state "none:") (hasPrefix "redis" $state) .Values.redis.enabled .Values.redis.externalUrl -}}
{{- if and $many (not $shared) -}}
{{ fail "several gateways would undo each other's loads: set redis.enabled, redis.externalUrl or GATEWAY_STATE=none:" }}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.externalUrl }}{{ fail "set redis.enabled or redis.externalUrl, not both" }}{{ end -}}
{{- if and .Values.redis.enabled (not .Values.redis.secretName) }}{{ fail "redis.enabled requires redis.secretName" }}{{ end -}}
{{- if and .Values.jobs.enabled (not (or .Values.redis.enabled .Values.redis.externalUrl)) }}{{ fail "jobs.enabled requires redis.enabled or redis.externalUrl" }}{{ end -}}
{{- if and .Values.jobs.enabled (not .Values.jobs.secretName) }}{{ fail "jobs.enabled requires jobs.secretName" }}{{ end -}}
{{- if and (not $triton.enabled) (not $triton.urls) }}{{ fail "triton.enabled=false requires triton.urls" }}{{ end -}}
{{- if and $triton.enabled $triton.urls }}{{ fail "triton.urls is for triton.enabled=false" }}{{ end -}}
{{- if and (eq $triton.repository.type "pvc") (not $triton.repository.claimName) }}{{ fail "triton.repository.type=pvc requires triton.repository.claimName" }}{{ end -}}
{{- if eq $triton.repository.type "pvc" -}}
{{- $mode := $triton.repository.accessMode -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $triton.repository.claimName -}}
{{- if and $claim (not (has $mode $claim.spec.accessModes)) }}{{ fail (printf "the claim %s has the access modes %s, not triton.repository.accessMode %s" $triton.repository.claimName (join ", " $claim.spec.accessModes) $mode) }}{{ end -}}
{{- if and (eq $mode "ReadWriteOnce") (or .Values.keda.enabled (gt (int $triton.replicas) 1) (ne (toString $triton.rollingUpdate.maxSurge) "0")) -}}
{{ fail "a claim with ReadWriteOnce belongs to one node, on which a second Triton, also that of a rollout, may have no room: set triton.replicas=1 and triton.rollingUpdate={maxUnavailable: 1, maxSurge: 0}, or use ReadWriteMany" }}
{{- end -}}
{{- if and (include "triton-gateway.uploads" .) (ne $mode "ReadWriteMany") }}{{ fail "triton.repository.uploads requires a claim with ReadWriteMany: the gateways and the Tritons mount it" }}{{ end -}}
{{- end -}}
{{- if and (include "triton-gateway.uploads" .) (eq $state "none:") (not (or .Values.redis.enabled .Values.redis.externalUrl)) }}{{ fail "triton.repository.uploads requires Redis: GATEWAY_STATE=none: accepts no changes of models" }}{{ end -}}
{{- if and (ne $triton.repository.uploads "off") (not (include "triton-gateway.uploads" .)) }}{{ fail "triton.repository.uploads is for triton.repository.type=pvc without cpuOnly; with a bucket, set GATEWAY_REPOSITORY and GATEWAY_MODEL_UPLOADS" }}{{ end -}}
{{- $schemes := dict "s3" "s3://" "gcs" "gs://" "azure" "as://" "image" "/" -}}
{{- with get $schemes $triton.repository.type -}}
{{- if not (hasPrefix . $triton.repository.url) }}{{ fail (printf "triton.repository.url must begin with %s for the type %s" . $triton.repository.type) }}{{ end -}}
{{- end -}}
{{- if and .Values.keda.enabled (not $triton.enabled) }}{{ fail "keda.enabled scales the Tritons of the chart: it requires triton.enabled" }}{{ end -}}
{{- if and .Values.keda.enabled (gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas)) }}{{ fail "keda.minReplicas exceeds keda.maxReplicas" }}{{ end -}}
{{- if and .Values.keda.scaleToZero (not .Values.keda.enabled) }}{{ fail "keda.scaleToZero requires keda.enabled" }}{{ end -}}
{{- $disabled := list "0" "f" "false" "n" "no" "off" -}}
{{- if and .Values.keda.enabled (has (lower (get $settings "GATEWAY_METRICS_REPLICAS")) $disabled) }}{{ fail "keda.enabled requires the metrics of the Tritons: use monitoring.scrapeTritons in place of GATEWAY_METRICS_REPLICAS" }}{{ end -}}
{{- if and .Values.monitoring.scrapeTritons (not (and .Values.monitoring.enabled $triton.enabled)) }}{{ fail "monitoring.scrapeTritons requires monitoring.enabled and triton.enabled" }}{{ end -}}
{{- if and $gateway.autoscaling.enabled (gt (int $gateway.autoscaling.minReplicas) (int $gateway.autoscaling.maxReplicas)) }}{{ fail "gateway.autoscaling.minReplicas exceeds gateway.autoscaling.maxReplicas" }}{{ end -}}
{{- $fewest := ternary $gateway.autoscaling.minReplicas $gateway.replicas $gateway.autoscaling.enabled -}}
{{- if and (gt (int $fewest) 1) (ge (int $gateway.maxUnavailable) (int $fewest)) }}{{ fail "gateway.maxUnavailable would allow the eviction of every gateway" }}{{ end -}}
{{- $least := ternary .Values.keda.minReplicas $triton.replicas .Values.keda.enabled -}}
{{- if and (gt (int $least) 1) (ge (int $triton.maxUnavailable) (int $least)) }}{{ fail "triton.maxUnavailable would allow the eviction of every Triton" }}{{ end -}}
{{- end -}}
