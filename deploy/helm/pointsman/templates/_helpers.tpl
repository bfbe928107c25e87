{{- define "pointsman.name" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
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

{{/* Labels of every object; of: what the object is named by. */}}
{{- define "pointsman.labels" -}}
app.kubernetes.io/name: {{ .of }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .role }}
llm-d.ai/role: {{ . }}
{{- end }}
app.kubernetes.io/part-of: pointsman
{{ include "pointsman.releaseLabels" .root }}
{{- end -}}

{{/* Labels by which tools find what a release has made. */}}
{{- define "pointsman.releaseLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of a Pod beyond those by which it is selected; own: its podLabels. */}}
{{- define "pointsman.podLabels" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with merge (dict) .own .root.Values.commonLabels }}
{{ toYaml . }}
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
{{- if not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $repository) -}}
{{- $why := printf "images.%s.repository: %s names no registry: set images.registry" .name $repository -}}
{{- $registry := (.root.Values.global | default dict).imageRegistry | default $images.registry -}}
{{- $repository = printf "%s/%s" (required $why $registry) $repository -}}
{{- end -}}
image: {{ $repository }}:{{ $image.tag }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- with $images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- define "pointsman.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "pointsman.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pointsman.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
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

{{- define "pointsman.tcpProbes" -}}
startupProbe:
  tcpSocket: {port: http}
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 60
livenessProbe:
  tcpSocket: {port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  tcpSocket: {port: http}
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
  {{- with .Values.picker.extraEnv }}
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
    {{- include "pointsman.containerSecurity" . | nindent 4 }}
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

{{- define "pointsman.addonLabels" -}}
app.kubernetes.io/name: {{ .of }}
{{ include "pointsman.releaseLabels" .root }}
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
  env:
  # The image asks for all GPUs of the node; this container needs none.
  - {name: NVIDIA_VISIBLE_DEVICES, value: void}
  ports:
  - {name: http, containerPort: 8000}
  {{- include "pointsman.tcpProbes" . | nindent 2 }}
  resources:
    {{- toYaml $sidecar.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.containerSecurity" . | nindent 4 }}
{{- end -}}
