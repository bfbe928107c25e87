{{/* The file of --autoscale (kind picker). Refuses what cannot be scaled so. */}}
{{- define "pointsman.plan" -}}
{{- $bounds := pick .Values.autoscaling "minReplicas" "maxReplicas" }}
{{- $name := printf "%s-gpu" (include "pointsman.worker" .) }}
{{- $groups := list }}
{{- if and .Values.workers.gpu.enabled (not .Values.pools) }}
{{- $groups = append $groups (merge (dict "deployment" $name) $bounds) }}
{{- end }}
{{- if and .Values.workers.disaggregation.enabled (not .Values.pools) }}
{{- range list "prefill" "decode" }}
{{- $groups = append $groups (merge (dict "deployment" (printf "%s-%s" $name .) "stage" .) $bounds) }}
{{- end }}
{{- end }}
{{- $groups = .Values.autoscaling.plan.groups | default $groups }}
{{- if not $groups }}
{{- fail "autoscaling: kind picker has nothing to scale; enable workers.gpu or workers.disaggregation, or give autoscaling.plan.groups, with pools each with its pool" }}
{{- end }}
{{- if .Values.pools }}
{{- $known := include "pointsman.namespaceOfPool" . | fromYaml }}
{{- range $groups }}
{{- if not (hasKey $known (.pool | default "")) }}
{{- fail (printf "autoscaling.plan.groups: each needs its pool, one of %s" (keys $known | sortAlpha | join ", ")) }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml (merge (dict "groups" $groups) .Values.autoscaling.plan) }}
{{- end -}}

{{/* The namespaces of `pools`, as YAML by what the picker calls the pools. */}}
{{- define "pointsman.namespaceOfPool" -}}
{{- $pools := (include "pointsman.pools" . | fromYaml).all }}
{{- $names := list }}
{{- range $pools }}{{ $names = append $names .name }}{{ end }}
{{- range $pools }}
{{- $same := without $names .name | len | add 1 | eq (len $names | int64) }}
{{ ternary .name (printf "%s/%s" .namespace .name) $same | quote }}: {{ .namespace }}
{{- end }}
{{- end -}}

{{/* The Deployments that the picker scales, as YAML of namespace: names. */}}
{{- define "pointsman.scaled" -}}
{{- $scaled := dict }}
{{- if eq .Values.autoscaling.kind "picker" }}
{{- $ofPool := include "pointsman.namespaceOfPool" . | fromYaml }}
{{- range (include "pointsman.plan" . | fromYaml).groups }}
{{- if .deployment }}
{{- $namespace := .namespace | default (get $ofPool (.pool | default "") | default $.Release.Namespace) }}
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
