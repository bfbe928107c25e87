{{/* Tenants of the standalone Envoy: a container that adds them, with their keys, to its bootstrap. */}}
{{- define "pointsman.tenantsContainer" -}}
{{- with .Values.standalone.tenantsSecret }}
{{- if eq $.Values.standalone.responseBodies "off" }}
{{- fail "standalone.tenantsSecret needs standalone.responseBodies usage or all: limits of tokens count what responses report" }}
{{- end }}
- name: tenants
  {{- include "pointsman.image" (dict "root" $ "name" "picker") | nindent 2 }}
  command: [pointsman, tenants, /etc/tenants/tenants.yaml]
  args:
  - --bootstrap=/etc/envoy/envoy{{ if eq $.Values.standalone.responseBodies "all" }}-all{{ end }}.yaml
  - --into=/run/envoy/envoy.yaml
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 256Mi}
  securityContext:
    {{- include "pointsman.containerSecurity" (dict "root" $) | nindent 4 }}
  volumeMounts:
  - {name: envoy, mountPath: /etc/envoy, readOnly: true}
  - {name: tenants, mountPath: /etc/tenants, readOnly: true}
  - {name: bootstrap, mountPath: /run/envoy}
{{- end }}
{{- end }}

{{- define "pointsman.tenantsVolumes" -}}
- name: tenants
  secret: {secretName: {{ .Values.standalone.tenantsSecret }}, defaultMode: 0440}
- name: bootstrap
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- end }}
