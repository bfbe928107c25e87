{{/* The pools of `pools`, each with what it leaves out, as YAML of `all`. Refuses what cannot be served together. */}}
{{- define "pointsman.pools" -}}
{{- $all := list }}
{{- $seen := dict }}
{{- range .Values.pools }}
{{- $pool := mergeOverwrite (dict
      "namespace" $.Release.Namespace
      "selector" (dict "app" .name)
      "targetPorts" $.Values.pool.targetPorts
      "appProtocol" $.Values.pool.appProtocol
      "models" (list .name)
      "objectives" list) (deepCopy .) }}
{{- range list (printf "%s/%s" $pool.namespace $pool.name) (printf "port %v" $pool.grpcPort) }}
{{- if hasKey $seen . }}{{ fail (printf "pools: %s is there twice" .) }}{{ end }}
{{- $_ := set $seen . true }}
{{- end }}
{{- $_ := set $pool "isHere" (eq $pool.namespace $.Release.Namespace) }}
{{- $all = append $all $pool }}
{{- end }}
{{- if $all }}
{{- if ne .Values.mode "gateway" }}{{ fail "pools: only with mode gateway" }}{{ end }}
{{- if has .Values.autoscaling.kind (list "hpa" "keda") }}{{ fail "pools: autoscaling of several is kind picker; or scale their Pods by objects of your own" }}{{ end }}
{{- else if .Values.bodyBasedRouting.enabled }}
{{- fail "bodyBasedRouting: only with pools, between which it chooses" }}
{{- end }}
{{- dict "all" $all | toYaml }}
{{- end -}}

{{/* What the pool of --pool is called there. */}}
{{- define "pointsman.poolFlag" -}}
{{- if not .isHere }}{{ .namespace }}/{{ end }}{{ .name }}:{{ .grpcPort }}
{{- end -}}

{{/* What the Lease of an election is called after. */}}
{{- define "pointsman.leasePool" -}}
{{- if .Values.pools }}{{ (first .Values.pools).name }}{{ else }}{{ include "pointsman.poolInSeries" . }}{{ end -}}
{{- end -}}

{{/* What a picker asks about pools of one namespace; pools: their names. */}}
{{- define "pointsman.poolRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- if .pools }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  resourceNames: {{ toJson .pools }}
  verbs: [list, watch]
- apiGroups: [llm-d.ai]
  resources: [inferenceobjectives, inferencemodelrewrites]
  verbs: [list, watch]
{{- end }}
{{- end -}}

{{/* What the picker asks in its own namespace; pools: names of those that are followed there, isAlone: it has one pool. */}}
{{- define "pointsman.pickerRules" -}}
{{- if or .isAlone .pools }}
{{ include "pointsman.poolRules" . }}
{{- end }}
{{- if eq .root.Values.picker.highAvailability "leader-election" }}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [epp-{{ .root.Release.Namespace }}-{{ include "pointsman.leasePool" .root }}.llm-d.ai]
  verbs: [get, update]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
{{- end }}
{{- if eq .root.Values.picker.highAvailability "active-active" }}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end }}
{{- with get (include "pointsman.scaled" .root | fromYaml) .root.Release.Namespace }}
{{ include "pointsman.scaleRule" . }}
{{- end }}
{{- end -}}

{{/* root, labels, and what is of this one pool: name, namespace, selector, targetPorts, appProtocol, grpcPort. */}}
{{- define "pointsman.inferencePool" -}}
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata:
  {{- include "pointsman.metadata" (merge (dict "name" .name "namespace" .namespace) .meta) | nindent 2 }}
spec:
  selector:
    matchLabels:
      {{- toYaml .selector | nindent 6 }}
  targetPorts:
  {{- range .targetPorts }}
  - number: {{ . }}
  {{- end }}
  appProtocol: {{ .appProtocol }}
  endpointPickerRef:
    name: {{ include "pointsman.picker" .root }}
    port:
      number: {{ .grpcPort }}
    failureMode: {{ .root.Values.pool.failureMode }}
{{- end -}}

{{/* root, labels, name, pool, models: none leads every request there. */}}
{{- define "pointsman.route" -}}
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  {{- include "pointsman.metadata" (merge (dict "name" .name "namespace" .root.Release.Namespace) .meta) | nindent 2 }}
spec:
  parentRefs:
  - group: gateway.networking.k8s.io
    kind: Gateway
    name: {{ default (include "pointsman.name" .root) .root.Values.gateway.name }}
  {{- with .root.Values.route.hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
  - matches:
    {{- range .models }}
    - path: {type: PathPrefix, value: /}
      headers:
      - {type: Exact, name: X-Gateway-Model-Name, value: {{ . | quote }}}
    {{- else }}
    - path: {type: PathPrefix, value: /}
    {{- end }}
    backendRefs:
    - {group: inference.networking.k8s.io, kind: InferencePool, name: {{ .pool }}, weight: 1}
    timeouts: {request: 0s}
{{- end -}}

{{/* labels, namespace, pool, objective. */}}
{{- define "pointsman.objective" -}}
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata:
  {{- include "pointsman.metadata" (merge (dict "name" .objective.name "namespace" .namespace) .meta) | nindent 2 }}
spec:
  priority: {{ .objective.priority }}
  poolRef: {group: inference.networking.k8s.io, kind: InferencePool, name: {{ .pool }}}
{{- end -}}
