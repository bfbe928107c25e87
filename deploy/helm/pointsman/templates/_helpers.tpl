{{- define "pointsman.name" -}}
{{- $suffix := empty .Values.nameOverride | ternary "" (printf "-%s" .Values.nameOverride) -}}
{{- default (printf "%s%s" .Release.Name $suffix) .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "pointsman.picker" -}}{{ include "pointsman.name" . }}-picker{{- end -}}
{{- define "pointsman.metricsReader" -}}{{ include "pointsman.name" . }}-metrics-reader{{- end -}}
{{- define "pointsman.worker" -}}{{ include "pointsman.name" . }}-worker{{- end -}}

{{- define "pointsman.pool" -}}
{{- default (include "pointsman.name" .) .Values.pool.name -}}
{{- end -}}

{{/* How series call the pool: selected Pods are known by the name of the picker's Deployment. */}}
{{- define "pointsman.poolInSeries" -}}
{{- if eq .Values.mode "standalone" }}{{ include "pointsman.picker" . }}{{ else }}{{ include "pointsman.pool" . }}{{ end -}}
{{- end -}}

{{/* Metadata of every object; of: what it belongs to. Also name, component, role, labels, annotations, and namespace: the
release's, "": for the whole cluster. */}}
{{- define "pointsman.metadata" -}}
name: {{ .name | default .of }}
{{- with dig "namespace" .root.Release.Namespace . }}
namespace: {{ . }}
{{- end }}
labels:
  app.kubernetes.io/name: {{ .of }}
  {{- with .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
  {{- with .role }}
  llm-d.ai/role: {{ . }}
  {{- end }}
  app.kubernetes.io/part-of: pointsman
  {{- include "pointsman.releaseLabels" .root | nindent 2 }}
  {{- with merge (dict) (.labels | default dict) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Labels by which tools find what a release has made. */}}
{{- define "pointsman.releaseLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Labels of a Pod beyond those by which it is selected; own: its podLabels. */}}
{{- define "pointsman.podLabels" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with merge (dict) .own .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A map, with the entries of another in place of its own; Helm's mergeOverwrite leaves out those that are false. */}}
{{- define "pointsman.over" -}}
{{- $all := deepCopy .all }}
{{- range $key, $value := .own | default dict }}
{{- $_ := set $all $key $value }}
{{- end }}
{{- toYaml $all }}
{{- end -}}

{{/* Values of workers of one kind: own, and those of all; maps are merged, lists joined. */}}
{{- define "pointsman.workerValues" -}}
{{- $values := deepCopy .own }}
{{- range $key, $all := omit .root.Values.workers "sim" "cpu" "gpu" "disaggregation" }}
{{- if kindIs "slice" $all }}
{{- $_ := set $values $key (concat $all (get $values $key | default list)) }}
{{- else if kindIs "map" $all }}
{{- $_ := set $values $key (include "pointsman.over" (dict "all" $all "own" (get $values $key)) | fromYaml) }}
{{- else }}
{{- $_ := set $values $key (get $values $key | default $all) }}
{{- end }}
{{- end }}
{{- toYaml $values }}
{{- end -}}

{{/* Where a Pod runs and as whom; values: of picker or worker, names: labels that select it, spread: whether it spreads by itself. */}}
{{- define "pointsman.podFields" -}}
{{- with pick .values "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- range $key, $value := . }}
{{- if $value }}
{{ dict $key $value | toYaml }}
{{- end }}
{{- end }}
{{- end }}
securityContext:
  {{- include "pointsman.over" (dict "all" .root.Values.podSecurityContext "own" .values.podSecurityContext) | nindent 2 }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range .values.topologySpreadConstraints }}
- {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $.names))) | nindent 2 }}
{{- end }}
{{- else if .spread }}
topologySpreadConstraints:
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- toYaml $.names | nindent 6 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pointsman.pickerAccount" -}}
{{- default (include "pointsman.picker" .) .Values.picker.serviceAccount.name -}}
{{- end -}}

{{/* The image and pull policy of a container; name: of the image in the values. */}}
{{- define "pointsman.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := index $images .name -}}
{{- $repository := $image.repository -}}
{{- $host := regexFind "^([^/]*[.:][^/]*|localhost)/" $repository -}}
{{- $global := .root.Values.global.imageRegistry -}}
{{- if $global -}}
{{- $repository = printf "%s/%s" $global (trimPrefix $host $repository) -}}
{{- else if not $host -}}
{{- $why := printf "images.%s.repository: %s names no registry: set images.registry" .name $repository -}}
{{- $repository = printf "%s/%s" (required $why $images.registry) $repository -}}
{{- end -}}
image: {{ $repository }}:{{ $image.tag }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- with $images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- define "pointsman.containerSecurity" -}}
{{- include "pointsman.over" (dict "all" .root.Values.securityContext "own" .own) }}
{{- end -}}

{{/* Names of secrets, or objects that name them; also those of a parent chart. */}}
{{- define "pointsman.pullSecrets" -}}
{{- with concat (.Values.global.imagePullSecrets | default list) .Values.images.pullSecrets | uniq }}
imagePullSecrets:
{{- range . }}
- name: {{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Probes by HTTP; ready: the path that says so; start: seconds between and number of tries at the start. */}}
{{- define "pointsman.httpProbes" -}}
startupProbe:
  httpGet: {path: {{ .alive }}, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: {{ .startPeriod | default 1 }}
  timeoutSeconds: 2
  failureThreshold: {{ .startTries | default 60 }}
livenessProbe:
  httpGet: {path: {{ .alive }}, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .deadTries | default 3 }}
readinessProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* Of the port with this name. */}}
{{- define "pointsman.tcpProbes" -}}
startupProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 60
livenessProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "pointsman.grpcProbes" -}}
startupProbe:
  grpc: {port: 9003, service: liveness}
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 60
livenessProbe:
  grpc: {port: 9003, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  grpc: {port: 9003, service: readiness}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* The flag and the variables of a program that sends spans. */}}
{{- define "pointsman.tracingArgs" -}}
{{- if .Values.tracing.endpoint }}
- --tracing
{{- end }}
{{- end -}}
{{- define "pointsman.tracingEnv" -}}
{{- with .Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $.Values.tracing.samplerRatio | quote }}}
{{- end }}
{{- end -}}

{{/* The picker's container, which is a sidecar of Envoy's in mode standalone. */}}
{{- define "pointsman.pickerContainer" -}}
{{- $standalone := eq .Values.mode "standalone" -}}
{{- $pools := (include "pointsman.pools" . | fromYaml).all -}}
- name: picker
  {{- include "pointsman.image" (dict "root" . "name" "picker") | nindent 2 }}
  {{- if $standalone }}
  restartPolicy: Always
  {{- end }}
  args:
  {{- if $standalone }}
  - --endpoint-selector={{ .Values.standalone.endpointSelector | default (printf "app.kubernetes.io/name=%s" (include "pointsman.worker" .)) }}
  - --endpoint-target-ports={{ join "," .Values.standalone.targetPorts }}
  - --bind-address=127.0.0.1
  - --xds-port=9004
  - --xds-cluster-name=default
  {{- else }}
  {{- range $pools }}
  - --pool={{ include "pointsman.poolFlag" . }}
  {{- else }}
  - --pool-name={{ include "pointsman.pool" . }}
  {{- end }}
  {{- end }}
  - --pool-namespace=$(NAMESPACE)
  - --config-file=/config/picker.yaml
  - --metrics-bind-address=0.0.0.0
  - --enable-grpc-stream-metrics
  - --drain-timeout=115s
  - --zap-encoder=json
  {{- if eq .Values.picker.highAvailability "leader-election" }}
  - --ha-enable-leader-election
  {{- end }}
  {{- if eq .Values.picker.highAvailability "active-active" }}
  - --peer-slices={{ include "pointsman.picker" . }}-peers:9005
  - {{ empty .Values.picker.peerCertificateSecret | ternary "--peer-insecure" "--peer-cert-path=/peers" }}
  {{- end }}
  {{- if .Values.picker.hashSeedSecret }}
  - --hash-seed-file=/hash-seed/seed
  {{- end }}
  {{- if .Values.picker.metrics.certificateSecret }}
  - --metrics-cert-dir=/metrics-certificate
  {{- end }}
  {{- if .Values.picker.metrics.auth }}
  - --metrics-endpoint-auth
  {{- end }}
  {{- if eq .Values.autoscaling.kind "picker" }}
  - --autoscale=/config/autoscale.yaml
  {{- end }}
  {{- if and (eq .Values.mode "standalone") (ne .Values.standalone.responseBodies "off") }}
  - --response-bodies={{ .Values.standalone.responseBodies }}
  {{- end }}
  {{- if and $standalone .Values.standalone.tenantsSecret }}
  - --token-limits
  {{- end }}
  {{- include "pointsman.tracingArgs" . | indent 2 }}
  {{- if .Values.bodyBasedRouting.enabled }}
  - --route-by-model
  - --model-header-only
  {{- end }}
  {{- range .Values.picker.extraArgs }}
  - {{ . | quote }}
  {{- end }}
  env:
  - name: NAMESPACE
    valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- include "pointsman.tracingEnv" . | indent 2 }}
  {{- with .Values.picker.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .Values.picker.extraEnvFrom }}
  envFrom:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  {{- if not $standalone }}
  - {name: grpc, containerPort: 9002}
  - {name: grpc-health, containerPort: 9003}
  {{- range $pools }}
  - {name: grpc-{{ .grpcPort }}, containerPort: {{ .grpcPort }}}
  {{- end }}
  {{- end }}
  - {name: metrics, containerPort: 9090}
  {{- if eq .Values.picker.highAvailability "active-active" }}
  - {name: peers, containerPort: 9005}
  {{- end }}
  {{- if $standalone }}
  {{- $scheme := empty .Values.picker.metrics.certificateSecret | ternary "" "HTTPS" }}
  {{- include "pointsman.httpProbes" (dict "alive" "/healthz" "ready" "/readyz" "port" "metrics" "scheme" $scheme) | nindent 2 }}
  {{- else }}
  {{- include "pointsman.grpcProbes" . | nindent 2 }}
  lifecycle:
    preStop: {sleep: {seconds: 10}}
  {{- end }}
  resources:
    {{- toYaml .Values.picker.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.containerSecurity" (dict "root" . "own" .Values.picker.securityContext) | nindent 4 }}
  volumeMounts:
  - {name: config, mountPath: /config, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if and (eq .Values.picker.highAvailability "active-active") .Values.picker.peerCertificateSecret }}
  - {name: peers, mountPath: /peers, readOnly: true}
  {{- end }}
  {{- if .Values.picker.hashSeedSecret }}
  - {name: hash-seed, mountPath: /hash-seed, readOnly: true}
  {{- end }}
  {{- if .Values.picker.metrics.certificateSecret }}
  - {name: metrics-certificate, mountPath: /metrics-certificate, readOnly: true}
  {{- end }}
  {{- with .Values.picker.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "pointsman.dnsEgress" -}}
- to:
  - namespaceSelector:
      matchLabels: {kubernetes.io/metadata.name: kube-system}
    podSelector:
      matchLabels: {k8s-app: kube-dns}
  ports:
  - {protocol: UDP, port: 53}
  - {protocol: TCP, port: 53}
{{- end -}}

{{/* The container in front of a decode worker. */}}
{{- define "pointsman.sidecar" -}}
{{- $sidecar := .Values.workers.disaggregation.sidecar -}}
- name: sidecar
  {{- include "pointsman.image" (dict "root" . "name" "workerGpu") | nindent 2 }}
  restartPolicy: Always
  command: [pointsman, sidecar]
  args:
  - --host=0.0.0.0
  - --port=8000
  - --decoder=http://127.0.0.1:8200
  - --prefill-timeout=60
  - --drain-timeout=10
  {{- with $sidecar.prefillerNetworks }}
  - --prefiller-networks={{ join "," . }}
  {{- end }}
  {{- include "pointsman.tracingArgs" . | indent 2 }}
  env:
  # The image asks for all GPUs of the node; this container needs none.
  - {name: NVIDIA_VISIBLE_DEVICES, value: void}
  {{- include "pointsman.tracingEnv" . | indent 2 }}
  ports:
  - {name: http, containerPort: 8000}
  {{- include "pointsman.tcpProbes" "http" | nindent 2 }}
  resources:
    {{- toYaml $sidecar.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.containerSecurity" (dict "root" .) | nindent 4 }}
{{- end -}}
