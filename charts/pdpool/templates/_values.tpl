{{/* Forms of values whose pattern would explain nothing in an error of values.schema.json. `right` completes "must be …". */}}
{{- define "pdpool.forms" -}}
image.registry:
  pattern: '^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?)(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$'
  right: a registry with an optional path, without scheme and without / at the end, such as registry.example:5000/team
image.tag:
  pattern: '^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$'
  right: a tag of at most 128 letters, digits and ._-, such as 0.1.0
{{- range $image := list "operator" "engine" "router" }}
image.{{ $image }}:
  pattern: '^[a-z0-9]+([._/-][a-z0-9]+)*$'
  right: a repository below image.registry, without tag, such as pdpool-{{ $image }}
image.digests.{{ $image }}:
  pattern: '^(sha256:[0-9a-f]{64})?$'
  right: sha256:, then 64 hexadecimal digits, without registry and repository
{{- end }}
rules.runbookUrl:
  pattern: '^[^\s"#$]+$'
  right: 'an address without spaces, quotes, $ and #, such as https://wiki.example/pdpool/monitoring; alerts add # and their name'
metrics.podMonitor.interval: {{ include "pdpool.durationForm" . }}
{{- range $window, $_ := .Values.rules.windows }}
rules.windows.{{ $window }}: {{ include "pdpool.durationForm" $ }}
{{- end }}
{{- end -}}

{{/* Form of a Prometheus duration that is not zero, as JSON. */}}
{{- define "pdpool.durationForm" -}}
{{- $units := "^([0-9]{1,5}d)?([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?([0-9]{1,5}ms)?$" -}}
{{- dict "pattern" $units "and" "[1-9]" "right" "a Prometheus duration above 0, such as 90s or 1m30s" | toJson -}}
{{- end -}}

{{/* Refuses values that the schema lets pass, with the value and what is right. */}}
{{- define "pdpool.checkValues" -}}
{{- range $path, $form := include "pdpool.forms" . | fromYaml -}}
{{- $value := $.Values -}}
{{- range splitList "." $path -}}
{{- $value = get ($value | default dict) . -}}
{{- end -}}
{{- $value = $value | default "" -}}
{{- if not (and (regexMatch $form.pattern $value) (regexMatch (get $form "and") $value)) -}}
{{- fail (printf "%s is %q; it must be %s" $path $value $form.right) -}}
{{- end -}}
{{- end -}}
{{- include "pdpool.checkQuantities" . -}}
{{- include "pdpool.checkEnvironment" . -}}
{{- range $name := list "clients" "watchers" -}}
{{- include "pdpool.checkPeers" (list (printf "networkPolicy.%s" $name) (get $.Values.networkPolicy $name | default list)) -}}
{{- end -}}
{{- include "pdpool.checkPrometheus" . -}}
{{- end -}}

{{/* Refuses a selector of Prometheus' namespaces to which Helm has added the default. It would select none, silently. */}}
{{- define "pdpool.checkPrometheus" -}}
{{- $selector := .Values.networkPolicy.prometheus.namespaceSelector -}}
{{- $labels := get $selector "matchLabels" | default dict -}}
{{- $others := or (gt (len $labels) 1) (get $selector "matchExpressions") -}}
{{- if and $others (hasKey $labels "kubernetes.io/metadata.name") -}}
{{- $name := get $labels "kubernetes.io/metadata.name" -}}
{{- fail (printf "networkPolicy.prometheus.namespaceSelector selects only the namespace %s, and only if your other labels match: Helm adds the chart's default to your value. Set its label kubernetes.io/metadata.name to null, or name the namespace there and leave the others out" $name) -}}
{{- end -}}
{{- end -}}

{{/* Refuses resources that are no quantities. A number has passed the schema. */}}
{{- define "pdpool.checkQuantities" -}}
{{- $form := `^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$` -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $resource, $quantity := get $.Values.operator.resources $kind | default dict -}}
{{- if and (kindIs "string" $quantity) (not (regexMatch $form $quantity)) -}}
{{- fail (printf "operator.resources.%s.%s is %q; it must be a quantity of Kubernetes, such as 500m or 512Mi" $kind $resource $quantity) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses a variable that stands twice: patches of a list merge its entries by name. */}}
{{- define "pdpool.checkEnvironment" -}}
{{- $seen := list -}}
{{- range .Values.operator.extraEnv -}}
{{- if has .name $seen -}}
{{- fail (printf "operator.extraEnv: %s stands twice; remove one" .name) -}}
{{- end -}}
{{- $seen = append $seen .name -}}
{{- end -}}
{{- end -}}

{{/* Refuses peers that the API server would refuse in the NetworkPolicy of every pool. Argument: list of key and peers. */}}
{{- define "pdpool.checkPeers" -}}
{{- $ipv4 := `^[0-9]{1,3}(\.[0-9]{1,3}){3}/([12]?[0-9]|3[0-2])$` -}}
{{- $ipv6 := `^[0-9a-fA-F:.]*:[0-9a-fA-F:.]*/(1[01][0-9]|12[0-8]|[1-9]?[0-9])$` -}}
{{- range $index, $peer := index . 1 -}}
{{- $path := printf "%s[%d]" (index $ 0) $index -}}
{{- if hasKey $peer "ipBlock" -}}
{{- if gt (len $peer) 1 -}}
{{- fail (printf "%s has ipBlock and a selector; give each an entry of its own" $path) -}}
{{- end -}}
{{- range concat (list $peer.ipBlock.cidr) (get $peer.ipBlock "except" | default list) -}}
{{- if not (or (regexMatch $ipv4 .) (regexMatch $ipv6 .)) -}}
{{- fail (printf "%s.ipBlock has %q; it must be a network, such as 10.0.0.0/8 or fd00::/64" $path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
