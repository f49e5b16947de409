{{- define "pool.podDefaults" -}}
serviceAccountName: {{ include "pool.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false # else variables of Kubernetes that begin with ASTRAFLOW_ would be read as settings
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "pool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: { drop: [ALL] }
{{- end -}}
