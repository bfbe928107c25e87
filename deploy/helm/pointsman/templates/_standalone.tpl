{{/* Envoy beside the picker; behind a front it is a sidecar, so that it ends later. */}}
{{- define "pointsman.envoyContainer" -}}
- name: envoy
  {{- include "pointsman.image" (dict "root" . "name" "envoy") | nindent 2 }}
  command: [envoy]
  args:
  - --config-path
  {{- if .Values.standalone.tenantsSecret }}
  - /run/envoy/envoy.yaml
  {{- else }}
  - /etc/envoy/envoy{{ if eq .Values.standalone.responseBodies "all" }}-all{{ end }}.yaml
  {{- end }}
  - --disable-hot-restart
  - --concurrency
  - {{ .Values.standalone.concurrency | quote }}
  - --drain-time-s
  - "5"
  - --drain-strategy
  - immediate
  {{- $port := .Values.standalone.front.enabled | ternary "envoy" "http" }}
  ports:
  - {name: {{ $port }}, containerPort: 8080}
  {{- include "pointsman.tcpProbes" $port | nindent 2 }}
  {{- if .Values.standalone.front.enabled }}
  restartPolicy: Always
  {{- else }}
  lifecycle:
    preStop:
      exec:
        command: [bash, /etc/envoy/drain.sh, "115"]
  {{- end }}
  resources:
    {{- toYaml .Values.standalone.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.containerSecurity" (dict "root" .) | nindent 4 }}
  volumeMounts:
  - {name: envoy, mountPath: /etc/envoy, readOnly: true}
  {{- if .Values.standalone.tenantsSecret }}
  - {name: bootstrap, mountPath: /run/envoy, readOnly: true}
  {{- end }}
{{- end -}}

{{/* What clients reach in place of Envoy: streams that outlive their workers. */}}
{{- define "pointsman.frontContainer" -}}
- name: front
  {{- include "pointsman.image" (dict "root" . "name" "picker") | nindent 2 }}
  command: [pointsman, front]
  args:
  - --host=0.0.0.0
  - --port=8081
  - --gateway=http://127.0.0.1:8080
  - --drain-timeout=100
  {{- include "pointsman.tracingArgs" . | indent 2 }}
  {{- range .Values.standalone.front.extraArgs }}
  - {{ . | quote }}
  {{- end }}
  {{- with include "pointsman.tracingEnv" . | trim }}
  env:
  {{- . | nindent 2 }}
  {{- end }}
  ports:
  - {name: http, containerPort: 8081}
  {{- include "pointsman.tcpProbes" "http" | nindent 2 }}
  lifecycle:
    preStop: {sleep: {seconds: 10}}
  resources:
    {{- toYaml .Values.standalone.front.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.containerSecurity" (dict "root" .) | nindent 4 }}
{{- end -}}
