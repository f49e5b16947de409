{{- /* The pod of a trainer's ranks, for a StatefulSet as for a JobSet. (dict "root" $ "policy" merged settings
"index" field that numbers the pods "leader" host name of the first pod) */ -}}
{{- define "astraflow.trainerPod" -}}
{{- $root := .root -}}
{{- $policy := .policy -}}
{{- $processes := max 1 (int $policy.gpu.count) -}}
{{- include "astraflow.podDefaults" (dict "root" $root) }}
terminationGracePeriodSeconds: {{ $root.Values.trainer.terminationGracePeriodSeconds }}
{{- if gt (int $policy.pods) 1 }}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "astraflow.selector" (dict "root" $root "part" .part) | nindent 8 }}
{{- end }}
{{- if or $policy.nodeSelector $policy.gpu.type }}
nodeSelector:
  {{- with $policy.gpu.type }}
  {{ $policy.gpu.nodeLabel }}: {{ . | quote }}
  {{- end }}
  {{- with $policy.nodeSelector }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with $policy.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: trainer
    image: {{ include "astraflow.image" (dict "root" $root "role" "trainer") }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- if or (gt (int $policy.pods) 1) (gt $processes 1) }}
    # Every rank ends when one is lost, so nothing is restarted here: the pods are.
    command: [python, -m, torch.distributed.run]
    args:
      - --nnodes={{ $policy.pods }}
      - --node-rank=$(POD_INDEX)
      - --nproc-per-node={{ $processes }}
      - --master-addr={{ .leader }}
      - --master-port=29500
      - --max-restarts=0
      - -m
      - astraflow_trainer
    {{- else }}
    args:
      - trainer
    {{- end }}
      - --run-id={{ $root.Values.run.id }}
      - --policy={{ $policy.name }}
      - --work-dir=/data
      - --probe-host=0.0.0.0
      - --probe-port=7072
      - --http-port=7071
      {{- if $root.Values.metrics.enabled }}
      - --http-host=0.0.0.0
      - --tls-cert-file=/secrets/server/tls.crt
      - --tls-key-file=/secrets/server/tls.key
      - --token-keys-file=/secrets/keys/token-keys.json
      {{- with $root.Values.identity.audience }}
      - --token-audience={{ . }}
      {{- end }}
      {{- end }}
      {{- if $root.Values.run.allowRecipeCode }}
      - --allow-recipe-code
      {{- end }}
      - --drain-timeout-s={{ $root.Values.trainer.drainSeconds }}
      - --log-format=json
      {{- range $policy.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    env:
      {{- include "astraflow.callerEnv" (dict "root" $root "token" "trainer.token") | nindent 6 }}
      {{- include "astraflow.storeEnv" $root | nindent 6 }}
      {{- if gt (int $policy.pods) 1 }}
      - name: POD_INDEX
        valueFrom:
          fieldRef: { fieldPath: {{ .index | quote }} }
      {{- else if gt $processes 1 }}
      - { name: POD_INDEX, value: "0" }
      {{- end }}
      {{- with $policy.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - { name: probe, containerPort: 7072 }
      {{- if $root.Values.metrics.enabled }}
      - { name: http, containerPort: 7071 }
      {{- end }}
    {{- /* The first start makes the initial model, or fetches one. */}}
    {{- include "astraflow.probes" (dict "startSeconds" 2700) | nindent 4 }}
    resources:
      requests:
        {{- toYaml $policy.resources.requests | nindent 8 }}
      limits:
        {{- toYaml $policy.resources.limits | nindent 8 }}
        {{- if $policy.gpu.count }}
        {{ $policy.gpu.resource }}: {{ $policy.gpu.count }}
        {{- end }}
    securityContext: {{- include "astraflow.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "astraflow.callerMounts" . | nindent 6 }}
      {{- include "astraflow.storeMounts" $root | nindent 6 }}
      {{- if $root.Values.metrics.enabled }}
      - { name: server, mountPath: /secrets/server, readOnly: true }
      - { name: keys, mountPath: /secrets/keys, readOnly: true }
      {{- end }}
      - { name: data, mountPath: /data }
      - { name: tmp, mountPath: /tmp }
      - { name: shm, mountPath: /dev/shm }
volumes:
  {{- include "astraflow.callerVolumes" (dict "root" $root "token" "trainer.token") | nindent 2 }}
  {{- include "astraflow.storeVolumes" $root | nindent 2 }}
  {{- if $root.Values.metrics.enabled }}
  - name: server
    secret: { secretName: {{ $root.Values.identity.tlsSecret }}, optional: false, defaultMode: 0440 }
  - name: keys
    secret:
      secretName: {{ $root.Values.identity.tokensSecret }}
      optional: false
      defaultMode: 0440
      items: [{ key: token-keys.json, path: token-keys.json }]
  {{- end }}
  - name: data
    persistentVolumeClaim: { claimName: {{ include "astraflow.trainerName" (dict "root" $root "policy" $policy) }} }
  - name: tmp
    emptyDir: { sizeLimit: 4Gi }
  - name: shm
    emptyDir: { medium: Memory, sizeLimit: {{ $policy.sharedMemory }} }
{{- end -}}
