{{- define "pdpool.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $release := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | replace "." "-" -}}
{{- $full := default $release .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- fail (printf "%s cannot be the name of a Service: it must begin with a letter; use such a release name, for example %s, or set fullnameOverride" $full .Chart.Name) -}}
{{- end -}}
{{ $full }}
{{- end -}}

{{- define "pdpool.operator" -}}
{{ include "pdpool.fullname" . }}-operator
{{- end -}}

{{- define "pdpool.lease" -}}
{{ default (include "pdpool.operator" .) .Values.operator.leaseName }}
{{- end -}}

{{/* Environment of the operator's container, as YAML. */}}
{{- define "pdpool.environment" -}}
# Without a name, kopf looks up the user, which the image does not have.
- name: POD_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: PDPOOL_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: PDPOOL_LEASE
  value: {{ include "pdpool.lease" . | quote }}
- name: PDPOOL_WATCH_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: PDPOOL_ENGINE_IMAGE
  value: {{ include "pdpool.image" (list . "engine") | quote }}
- name: PDPOOL_ROUTER_IMAGE
  value: {{ include "pdpool.image" (list . "router") | quote }}
- name: PDPOOL_ROUTER_SEED_FILE
  value: /etc/pdpool/seed/seed
- name: PDPOOL_KEY_EPOCH
  value: {{ .Values.seed.epoch | quote }}
- name: PDPOOL_POD_DEFAULTS
  value: {{ include "pdpool.podDefaults" . | quote }}
- name: PDPOOL_NETWORK_PEERS
  value: {{ include "pdpool.networkPeers" . | quote }}
- name: PDPOOL_LOG_LEVEL
  value: {{ .Values.operator.logLevel }}
{{- end -}}

{{/* Defaults of engine and router pods, as JSON. */}}
{{- define "pdpool.podDefaults" -}}
{{- with .Values.workloads -}}
{{- dict "imagePullPolicy" .imagePullPolicy "imagePullSecrets" (.imagePullSecrets | default list) "podSecurityContext" .podSecurityContext "containerSecurityContext" .securityContext | toJson -}}
{{- end -}}
{{- end -}}

{{/* Topology spread constraints as YAML, each with a selector. */}}
{{- define "pdpool.topologySpread" -}}
{{- $selector := dict "matchLabels" (include "pdpool.operatorSelector" . | fromYaml) -}}
{{- $constraints := list -}}
{{- range .Values.operator.topologySpreadConstraints -}}
{{- if hasKey . "labelSelector" -}}
{{- $constraints = append $constraints . -}}
{{- else -}}
{{- $constraints = append $constraints (merge (dict "labelSelector" $selector) .) -}}
{{- end -}}
{{- end -}}
{{ toYaml $constraints }}
{{- end -}}

{{- define "pdpool.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "pdpool.operator" .) .Values.serviceAccount.name }}
{{- else -}}
{{ required "serviceAccount.name: must name an existing ServiceAccount when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "pdpool.labels" -}}
{{- include "pdpool.labelsAnd" (list . "" dict) -}}
{{- end -}}

{{/* Labels of an object, as YAML. Argument: list of the root context, and key and labels of the value that adds to commonLabels. */}}
{{- define "pdpool.labelsAnd" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- include "pdpool.checkLabels" (list "commonLabels" $root.Values.commonLabels) }}
{{- include "pdpool.checkLabels" (slice . 1) }}
{{- with merge (dict) (index . 2 | default dict) ($root.Values.commonLabels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Refuses labels that would be duplicates, or that would match selectors of roles and pools. Argument: list of a value's key and its labels. */}}
{{- define "pdpool.checkLabels" -}}
{{- $own := list "helm.sh/chart" -}}
{{- range list "name" "instance" "version" "component" "managed-by" -}}
{{- $own = append $own (printf "app.kubernetes.io/%s" .) -}}
{{- end -}}
{{- range $label, $_ := index . 1 -}}
{{- if or (has $label $own) (hasPrefix "rbac.authorization.k8s.io/" $label) (hasPrefix "pdpool.dev/" $label) -}}
{{- include "pdpool.refuseOwn" (list (index $ 0) $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdpool.refuseOwn" -}}
{{- fail (printf "%s: %s belongs to the chart; leave it out" (index . 0) (index . 1)) -}}
{{- end -}}

{{- define "pdpool.operatorSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Image of one component. Argument: list of the root context and the component's key in .Values.image. */}}
{{- define "pdpool.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- $digest := get ($image.digests | default dict) (index . 1) -}}
{{ $image.registry }}/{{ get $image (index . 1) }}{{ $digest | empty | ternary (printf ":%s" (default $root.Chart.AppVersion $image.tag)) (printf "@%s" $digest) }}
{{- end -}}

{{- define "pdpool.seedSecret" -}}
{{ default (printf "%s-seed" (include "pdpool.fullname" .)) .Values.seed.existingSecret }}
{{- end -}}

{{/* The seed, base64: that of the cluster if it exists. It is cached, because Secret and checksum need the same random bytes. */}}
{{- define "pdpool.seed" -}}
{{- if not (hasKey .Values "_seed") -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "pdpool.seedSecret" .) -}}
{{- $seed := dig "data" "seed" "" $found -}}
{{- $_ := set .Values "_seed" (default (randBytes 48 | b64enc) $seed) -}}
{{- end -}}
{{ get .Values "_seed" }}
{{- end -}}

{{/* Milliseconds of a Prometheus duration, whose form `pdpool.checkValues` has checked. */}}
{{- define "pdpool.milliseconds" -}}
{{- $total := 0 -}}
{{- /* Without leading zeros, because int64 reads 010 as eight. */ -}}
{{- range $unit, $length := dict "d" 86400000 "h" 3600000 "m" 60000 "s" 1000 "ms" 1 -}}
{{- $count := regexFind (printf "[0-9]+%s([0-9]|$)" $unit) $ | regexFind "^[0-9]+" | regexFind "[1-9][0-9]*" -}}
{{- $total = add $total (mul $length (int64 $count)) -}}
{{- end -}}
{{ $total }}
{{- end -}}

{{/* Refuses windows with which the alert on a stuck queue could not fire, or would fire for a moving queue. 300 s is the
engines' default request deadline. */}}
{{- define "pdpool.checkWindows" -}}
{{- include "pdpool.checkValues" . -}}
{{- $window := .Values.rules.windows.noProgress -}}
{{- $stuck := .Values.rules.windows.bootstrapQueueStuck -}}
{{- $window_ms := include "pdpool.milliseconds" $window | int64 -}}
{{- if ge (add $window_ms (include "pdpool.milliseconds" $stuck | int64)) 300000 -}}
{{- fail (printf "rules.windows: noProgress (%s) and bootstrapQueueStuck (%s) must together be shorter than the engines' request deadline (300 s), such as 1m and 3m" $window $stuck) -}}
{{- end -}}
{{- with .Values.metrics.podMonitor -}}
{{- if and .enabled (lt $window_ms (mul 4 (include "pdpool.milliseconds" .interval | int64))) -}}
{{- fail (printf "rules.windows.noProgress: %s is shorter than four scrape intervals (metrics.podMonitor.interval: %s); lengthen it, or scrape more often" $window .interval) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The rule file with namespace and windows filled in. */}}
{{- define "pdpool.rules" -}}
{{- include "pdpool.checkWindows" . -}}
{{- $text := regexReplaceAllLiteral "^#.*\n" (.Files.Get "files/rules/pdpool.rules.yaml") "" | trim -}}
{{- $held_ms := include "pdpool.milliseconds" .Values.rules.windows.memoryHeld | int64 -}}
{{- $more := dict "namespace" .Release.Namespace "runbookUrl" .Values.rules.runbookUrl "memoryHeldSeconds" (divf $held_ms 1000 | toString) -}}
{{- range $name, $value := merge (dict) .Values.rules.windows $more -}}
{{- $text = replace (printf "${%s}" $name) $value $text -}}
{{- end -}}
{{ $text }}
{{- end -}}

{{- define "pdpool.needsMonitoringApi" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
{{- fail (printf "%s: the cluster has no monitoring.coreos.com/v1; install the Prometheus operator's CRDs first, or set it to false. `helm template` needs --api-versions monitoring.coreos.com/v1" .key) -}}
{{- end -}}
{{- end -}}

{{/* Prometheus as a NetworkPolicyPeer, as YAML. */}}
{{- define "pdpool.prometheus" -}}
namespaceSelector: {{ .Values.networkPolicy.prometheus.namespaceSelector | toJson }}
podSelector: {{ .Values.networkPolicy.prometheus.podSelector | default dict | toJson }}
{{- end -}}

{{/* Who may connect to engines beside engines and routers, as JSON. Empty without NetworkPolicies. */}}
{{- define "pdpool.networkPeers" -}}
{{- if .Values.networkPolicy.enabled -}}
{{- $own := dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace)) -}}
{{- $_ := set $own "podSelector" (dict "matchLabels" (include "pdpool.operatorSelector" . | fromYaml)) -}}
{{- $watchers := concat (list $own (include "pdpool.prometheus" . | fromYaml)) (.Values.networkPolicy.watchers | default list) -}}
{{- dict "watchers" $watchers "clients" (.Values.networkPolicy.clients | default list) | toJson -}}
{{- end -}}
{{- end -}}

{{- define "pdpool.monitoredNamespaces" -}}
{{- if .Values.watchNamespaces -}}
matchNames:
  {{- toYaml .Values.watchNamespaces | nindent 2 }}
{{- else -}}
any: true
{{- end -}}
{{- end -}}

{{/* Relabelings that give the series of a pod the labels of the documented scrape job. */}}
{{- define "pdpool.podLabels" -}}
- {sourceLabels: [__meta_kubernetes_namespace], targetLabel: namespace}
- {sourceLabels: [__meta_kubernetes_pod_name], targetLabel: pod}
- {sourceLabels: [__meta_kubernetes_pod_label_pdpool_dev_role], targetLabel: role}
- {sourceLabels: [__meta_kubernetes_pod_label_pdpool_dev_pool], targetLabel: pool}
{{- end -}}
