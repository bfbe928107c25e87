{{/* The file of --autoscale (kind picker). Refuses what cannot be scaled so. */}}
{{- define "pointsman.plan" -}}
{{- if eq .Values.picker.highAvailability "active-active" }}
{{- fail "autoscaling: kind picker needs one picker that plans; set picker.highAvailability to none or leader-election" }}
{{- end }}
{{- $bounds := pick .Values.autoscaling "minReplicas" "maxReplicas" }}
{{- $name := printf "%s-gpu" (include "pointsman.worker" .) }}
{{- $groups := list }}
{{- if .Values.workers.gpu.enabled }}
{{- $groups = append $groups (merge (dict "deployment" $name) $bounds) }}
{{- end }}
{{- if .Values.workers.disaggregation.enabled }}
{{- range list "prefill" "decode" }}
{{- $groups = append $groups (merge (dict "deployment" (printf "%s-%s" $name .) "stage" .) $bounds) }}
{{- end }}
{{- end }}
{{- $groups = .Values.autoscaling.plan.groups | default $groups }}
{{- if not $groups }}
{{- fail "autoscaling: kind picker has nothing to scale; enable workers.gpu or workers.disaggregation, or give autoscaling.plan.groups" }}
{{- end }}
{{- toYaml (merge (dict "groups" $groups) .Values.autoscaling.plan) }}
{{- end -}}

{{/* The Deployments that the picker scales, as YAML of namespace: names. */}}
{{- define "pointsman.scaled" -}}
{{- $scaled := dict }}
{{- if eq .Values.autoscaling.kind "picker" }}
{{- range (include "pointsman.plan" . | fromYaml).groups }}
{{- if .deployment }}
{{- $namespace := .namespace | default $.Release.Namespace }}
{{- $_ := set $scaled $namespace (append (get $scaled $namespace | default list) .deployment | uniq) }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml $scaled }}
{{- end -}}

{{/* What the picker may do to Deployments of one namespace; their names. */}}
{{- define "pointsman.scaleRule" -}}
- apiGroups: [apps]
  resources: [deployments/scale]
  resourceNames: {{ toJson . }}
  verbs: [get, update]
{{- end -}}

{{/* root, name: "true" for a Deployment whose replicas are not the chart's to set. */}}
{{- define "pointsman.isScaled" -}}
{{- if eq .root.Values.autoscaling.kind "picker" }}
{{- has .name (get (include "pointsman.scaled" .root | fromYaml) .root.Release.Namespace | default list) | ternary "true" "" }}
{{- else if ne .root.Values.autoscaling.kind "none" }}
{{- eq .name (printf "%s-gpu" (include "pointsman.worker" .root)) | ternary "true" "" }}
{{- end }}
{{- end -}}
