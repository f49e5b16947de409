{{- define "astraflow.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- /* Labels that select the pods of a part: (dict "root" $ "part" "dataflow") */ -}}
{{- define "astraflow.selector" -}}
app.kubernetes.io/part-of: astraflow
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "astraflow.labels" -}}
{{ include "astraflow.selector" . }}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* Image of a role: (dict "root" $ "role" "dataflow") */ -}}
{{- define "astraflow.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := printf "%s/%s" $image.registry (get $image.repositories .role) -}}
{{- with get $image.digests .role -}}
{{ printf "%s@%s" $name . }}
{{- else -}}
{{ printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "astraflow.serviceAccount" -}}
{{ default (include "astraflow.fullname" .) .Values.serviceAccount.name }}
{{- end -}}

{{- define "astraflow.redisUrl" -}}
{{- if .Values.redis.bring -}}
redis://{{ include "astraflow.fullname" . }}-valkey:6379/0
{{- else -}}
{{ .Values.redis.url }}
{{- end -}}
{{- end -}}

{{- define "astraflow.storeClaim" -}}
{{- if .Values.store.claim.bring -}}
{{ default (printf "%s-weights" (include "astraflow.fullname" .)) .Values.store.claim.existing }}
{{- end -}}
{{- end -}}

{{- define "astraflow.storeUri" -}}
{{ ternary "file:///store" .Values.store.uri .Values.store.claim.bring }}
{{- end -}}

{{- /* A policy's settings over the defaults, as YAML: (dict "root" $ "policy" $policy) */ -}}
{{- define "astraflow.policy" -}}
{{- mergeOverwrite (deepCopy .root.Values.trainer.defaults) (deepCopy .policy) | toYaml -}}
{{- end -}}

{{- define "astraflow.trainerName" -}}
{{ printf "%s-trainer-%s" (include "astraflow.fullname" .root) (.policy.name | lower | replace "_" "-") }}
{{- end -}}
