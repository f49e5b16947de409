{{- /* What every pod has: (dict "root" $ "part" "dataflow") */ -}}
{{- define "astraflow.podDefaults" -}}
serviceAccountName: {{ include "astraflow.serviceAccount" .root }}
automountServiceAccountToken: false
# Else Kubernetes sets variables such as ASTRAFLOW_DATAFLOW_PORT, which daemons would read as settings.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
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

{{- define "astraflow.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- /* Probes on the plaintext listener that has nothing else: liveness asks for the process alone, so that an outage of
Redis or of the store restarts nothing. (dict "startSeconds" 60) */ -}}
{{- define "astraflow.probes" -}}
startupProbe:
  httpGet: { path: /startedz, port: probe }
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div .startSeconds 5 }}
livenessProbe:
  httpGet: { path: /healthz, port: probe }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /readyz, port: probe }
  periodSeconds: 5
  timeoutSeconds: 3
{{- end -}}

{{- /* Options of everything that calls the dataflow server: (dict "root" $ "token" "trainer.token") */ -}}
{{- define "astraflow.callerEnv" -}}
- { name: ASTRAFLOW_JOIN, value: {{ printf "%s-dataflow:7070" (include "astraflow.fullname" .root) | quote }} }
- { name: ASTRAFLOW_CA_FILE, value: /secrets/tls/ca.crt }
- { name: ASTRAFLOW_TOKEN_FILE, value: /secrets/token/{{ .token }} }
{{- with .root.Values.identity.serverName }}
- { name: ASTRAFLOW_SERVER_NAME, value: {{ . | quote }} }
{{- end }}
{{- end -}}

{{- define "astraflow.callerMounts" -}}
- { name: ca, mountPath: /secrets/tls, readOnly: true }
- { name: token, mountPath: /secrets/token, readOnly: true }
{{- end -}}

{{- define "astraflow.callerVolumes" -}}
- name: ca
  secret:
    secretName: {{ .root.Values.identity.tlsSecret }}
    optional: false
    defaultMode: 0440
    items: [{ key: ca.crt, path: ca.crt }]
- name: token
  secret:
    secretName: {{ .root.Values.identity.tokensSecret }}
    optional: false
    defaultMode: 0440
    items: [{ key: {{ .token }}, path: {{ .token }} }]
{{- end -}}

{{- /* How to reach the weight store, for whoever reads or writes it. */ -}}
{{- define "astraflow.storeEnv" -}}
{{- with .Values.store.endpointUrl }}
- { name: ASTRAFLOW_STORE_ENDPOINT_URL, value: {{ . | quote }} }
{{- end }}
{{- with .Values.store.region }}
- { name: ASTRAFLOW_STORE_REGION, value: {{ . | quote }} }
{{- end }}
{{- if .Values.store.credentialsSecret }}
- { name: ASTRAFLOW_STORE_CREDENTIALS_FILE, value: /secrets/store/credentials }
{{- end }}
{{- end -}}

{{- define "astraflow.storeMounts" -}}
{{- if .Values.store.credentialsSecret }}
- { name: store-credentials, mountPath: /secrets/store, readOnly: true }
{{- end }}
{{- if .Values.store.claim.bring }}
- { name: weights, mountPath: /store }
{{- end }}
{{- end -}}

{{- define "astraflow.storeVolumes" -}}
{{- with .Values.store.credentialsSecret }}
- name: store-credentials
  secret:
    secretName: {{ . }}
    optional: false
    defaultMode: 0440
    items: [{ key: credentials, path: credentials }]
{{- end }}
{{- with include "astraflow.storeClaim" . }}
- name: weights
  persistentVolumeClaim: { claimName: {{ . }} }
{{- end }}
{{- end -}}
