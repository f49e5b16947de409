{{- define "pool.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains "astraflow" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name "astraflow" | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- /* Labels that select the pods of a part: (dict "root" $ "part" "dataflow") */ -}}
{{- define "pool.selector" -}}
app.kubernetes.io/part-of: astraflow
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "pool.labels" -}}
{{ include "pool.selector" . }}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* Image of a role: (dict "root" $ "role" "dataflow") */ -}}
{{- define "pool.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := printf "%s/%s" $image.registry (get $image.repositories .role) -}}
{{- with get $image.digests .role -}}
{{ printf "%s@%s" $name . }}
{{- else -}}
{{ printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "pool.serviceAccount" -}}
{{ default (include "pool.fullname" .) .Values.serviceAccount.name }}
{{- end -}}

