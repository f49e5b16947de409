{{- /* What a schema cannot say. Every problem is told at once, each with what to do about it. */ -}}
{{- define "pool.checks" -}}
{{- $v := .Values -}}
{{- $problems := list -}}
{{- if not $v.image.registry -}}
{{- $problems = append $problems "image.registry is not set: build and push the images (deploy/docker) and name their registry" -}}
{{- end -}}
{{- if not $v.join.secret -}}
{{- $problems = append $problems (printf "join.secret is not set: make a join string for nodes of this name (`astraflow join-token --node '%s-*'` beside the token keys) and name the Secret that holds it under the key `join`" (include "pool.fullname" $)) -}}
{{- end -}}
{{- if not $v.pool -}}
{{- $problems = append $problems "pool is not set: name the pool, for example eu-h100; reports, tokens and autoscaling go by it" -}}
{{- end -}}
{{- if and (gt (int $v.gpu.count) 0) (not $v.gpu.type) (not $v.nodeSelector) -}}
{{- $problems = append $problems (printf "gpu.count = %d and no GPU type: set gpu.type to the value of the node label %s (kubectl get nodes -L %s), or a nodeSelector" (int $v.gpu.count) $v.gpu.nodeLabel $v.gpu.nodeLabel) -}}
{{- end -}}
{{- if and (eq $v.engine.kind "sglang") (eq (int $v.gpu.count) 0) -}}
{{- $problems = append $problems "engine.kind = sglang with gpu.count = 0: set gpu.count, or engine.kind=cpu" -}}
{{- end -}}
{{- if and (eq $v.engine.kind "sglang") (gt (int $v.gpu.count) 0) (ne (mod (int $v.gpu.count) (int $v.engine.tpSize)) 0) -}}
{{- $problems = append $problems (printf "gpu.count = %d is no multiple of engine.tpSize = %d: each copy of the model takes that many GPUs" (int $v.gpu.count) (int $v.engine.tpSize)) -}}
{{- end -}}
{{- if lt (int $v.terminationGracePeriodSeconds) (add (int $v.drainSeconds) 5 | int) -}}
{{- $problems = append $problems (printf "terminationGracePeriodSeconds = %d is below drainSeconds + 5 = %d: Kubernetes would kill the node in the middle of its drain; raise the one or lower the other" (int $v.terminationGracePeriodSeconds) (add (int $v.drainSeconds) 5 | int)) -}}
{{- end -}}
{{- with $v.autoscaling -}}
{{- if and .enabled (not .scalerAddress) -}}
{{- $problems = append $problems "autoscaling.scalerAddress is not set: HOST:PORT of the dataflow server's scaler (chart astraflow with scaler.enabled=true: NAME-dataflow.NAMESPACE:7073)" -}}
{{- end -}}
{{- if and .enabled (not .authSecret) -}}
{{- $problems = append $problems "autoscaling.authSecret is not set: the scaler speaks mutual TLS only; name a Secret with ca.crt, tls.crt and tls.key for KEDA" -}}
{{- end -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- $problems = append $problems (printf "autoscaling.minReplicas = %d is above maxReplicas = %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.metrics.enabled (not (and $v.metrics.tlsSecret $v.metrics.viewerSecret)) -}}
{{- $problems = append $problems "metrics.enabled needs metrics.tlsSecret (tls.crt, tls.key, ca.crt of the nodes' pages) and metrics.viewerSecret (token-keys.json, viewer.token): pages listen to no stranger" -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n\n* %s\n" (join "\n* " $problems)) -}}
{{- end -}}
{{- end -}}
