{{/*
The prefix of the names of objects in the release's namespace. Different releases never get the same
one, and it has at most 40 characters, which leaves room for what follows.
*/}}
{{- define "haulout.fullname" -}}
{{- $name := .Release.Name -}}
{{- if ne $name "haulout" -}}
{{- $name = printf "%s-haulout" $name -}}
{{- end -}}
{{- if and (not .Values.fullnameOverride) (regexMatch "^[0-9]|[.]" $name) -}}
{{- fail (printf "release %s: a name that begins with a digit or has a dot in it does not do for Services; choose another, or set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if gt (len $name) 40 -}}
{{- printf "%s-%s" ($name | trunc 31 | trimSuffix "-") ($name | sha256sum | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/*
The prefix of the names of cluster-scoped objects, which also differs from namespace to namespace: a
namespace has no dot in its name.
*/}}
{{- define "haulout.clusterName" -}}
{{- printf "%s.%s" .Release.Namespace (include "haulout.fullname" .) -}}
{{- end -}}

{{/* The labels by which everything of a release is found. */}}
{{- define "haulout.selector" -}}
app.kubernetes.io/name: haulout
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "haulout.labels" -}}
{{ include "haulout.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}
