{{- /* What a schema cannot say. Every problem is told at once, each with what to do about it. */ -}}
{{- define "astraflow.checks" -}}
{{- $v := .Values -}}
{{- $problems := list -}}
{{- if not $v.image.registry -}}
{{- $problems = append $problems "image.registry is not set: build and push the images (deploy/docker) and name their registry" -}}
{{- end -}}
{{- if not $v.identity.tlsSecret -}}
{{- $problems = append $problems "identity.tlsSecret is not set: make a certificate (`astraflow ca issue`, cert-manager) and name its Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if not $v.identity.tokensSecret -}}
{{- $problems = append $problems "identity.tokensSecret is not set: make keys and tokens (`astraflow token keys`, `astraflow token create`) and name their Secret; nothing listens to strangers" -}}
{{- end -}}
{{- if and $v.redis.bring $v.redis.url -}}
{{- $problems = append $problems (printf "redis.url = %q and redis.bring = true contradict each other: set redis.bring=false to use that Redis, or drop the URL to get a Valkey with the chart" $v.redis.url) -}}
{{- end -}}
{{- if not (or $v.redis.bring $v.redis.url) -}}
{{- $problems = append $problems "redis.bring = false needs redis.url, for example rediss://redis.example:6379/0; its password comes from redis.passwordSecret" -}}
{{- end -}}
{{- if and $v.redis.bring (not $v.redis.passwordSecret) -}}
{{- $problems = append $problems "redis.passwordSecret is not set: make a Secret with `password` and `users.acl` (docs/deploy/kubernetes.md has the command); no default password exists" -}}
{{- end -}}
{{- if and $v.store.claim.bring $v.store.uri -}}
{{- $problems = append $problems (printf "store.uri = %q and store.claim.bring = true contradict each other: one place holds the weights" $v.store.uri) -}}
{{- end -}}
{{- if not (or $v.store.claim.bring $v.store.uri) -}}
{{- $problems = append $problems "store.uri is not set: name a bucket, s3://bucket/prefix, or set store.claim.bring=true for a volume that every pod of this cluster mounts" -}}
{{- end -}}
{{- if and $v.store.claim.bring $v.dataflow.expose.enabled -}}
{{- $problems = append $problems "dataflow.expose.enabled with store.claim.bring: nodes of other regions cannot mount this cluster's volume; use a bucket (store.uri)" -}}
{{- end -}}
{{- if and $v.run.create (not (or $v.run.recipe $v.run.recipeConfigMap)) -}}
{{- $problems = append $problems "run.recipe is not set: name a recipe of the image, or a ConfigMap with recipe.yaml and its Python files in run.recipeConfigMap; or set run.create=false" -}}
{{- end -}}
{{- range $part := list "dataflow" "trainer" -}}
{{- $settings := get $v $part -}}
{{- if lt (int $settings.terminationGracePeriodSeconds) (add (int $settings.drainSeconds) 5 | int) -}}
{{- $problems = append $problems (printf "%s.terminationGracePeriodSeconds = %d is below %s.drainSeconds + 5 = %d: Kubernetes would kill the pod in the middle of its drain; raise the one or lower the other" $part (int $settings.terminationGracePeriodSeconds) $part (add (int $settings.drainSeconds) 5 | int)) -}}
{{- end -}}
{{- end -}}
{{- if not $v.trainer.policies -}}
{{- $problems = append $problems "trainer.policies is empty: name every policy of the recipe, for example --set 'trainer.policies[0].name=solver'" -}}
{{- end -}}
{{- $names := list -}}
{{- range $policy := $v.trainer.policies -}}
{{- $merged := include "astraflow.policy" (dict "root" $ "policy" $policy) | fromYaml -}}
{{- $short := $policy.name | lower | replace "_" "-" -}}
{{- if has $short $names -}}
{{- $problems = append $problems (printf "trainer.policies has %q twice: each policy has one trainer" $policy.name) -}}
{{- end -}}
{{- $names = append $names $short -}}
{{- if and (gt (int $merged.gpu.count) 0) (not $merged.gpu.type) (not $merged.nodeSelector) -}}
{{- $problems = append $problems (printf "policy %s asks for %d GPUs and names no type: set gpu.type to the value of the node label %s (kubectl get nodes -L %s), or a nodeSelector" $policy.name (int $merged.gpu.count) $merged.gpu.nodeLabel $merged.gpu.nodeLabel) -}}
{{- end -}}
{{- if and (gt (int $merged.pods) 1) (ne $merged.storage.accessMode "ReadWriteMany") -}}
{{- $problems = append $problems (printf "policy %s has %d pods and storage.accessMode %s: all ranks share one work folder; use a class that offers ReadWriteMany" $policy.name (int $merged.pods) $merged.storage.accessMode) -}}
{{- end -}}
{{- end -}}
{{- if and $v.scaler.enabled (not $v.scaler.clientCaSecret) -}}
{{- $problems = append $problems "scaler.clientCaSecret is not set: the scaler's listener is for mutual TLS only; name the Secret with the ca.crt that signed KEDA's client certificate" -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n\n* %s\n" (join "\n* " $problems)) -}}
{{- end -}}
{{- end -}}
