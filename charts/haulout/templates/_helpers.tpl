{{/*
The prefix of object names in the release's namespace. It is unique per release and has at most 40 characters,
which leaves room for suffixes.
*/}}
{{- define "haulout.fullname" -}}
{{- $name := .Release.Name -}}
{{- if ne $name "haulout" -}}
{{- $name = printf "%s-haulout" $name -}}
{{- end -}}
{{- if and (not .Values.fullnameOverride) (regexMatch "^[0-9]|[.]" $name) -}}
{{- fail (printf "release %s: Services cannot have a name that starts with a digit or contains a dot; choose another release name, or set fullnameOverride" .Release.Name) -}}
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
The prefix of names of cluster-scoped objects. It is also unique per namespace, because a namespace has no dot in
its name.
*/}}
{{- define "haulout.clusterName" -}}
{{- printf "%s.%s" .Release.Namespace (include "haulout.fullname" .) -}}
{{- end -}}

{{/* The labels that select all objects of a release. */}}
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

{{/* Whether Haulout issues the certificate of the webhook: "true" or nothing. */}}
{{- define "haulout.ownCertificate" -}}
{{- with .Values.admissionWebhook -}}
{{- if and .enabled (not .certificate.existingSecret) (not .certificate.certManager.issuerRef) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether there is anything to do for the certificate manager: "true" or nothing. */}}
{{- define "haulout.managesCertificate" -}}
{{- with .Values.admissionWebhook -}}
{{- if and .enabled (or .certificate.manageCaBundle (include "haulout.ownCertificate" $)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The Secret with the certificate of the webhook. The one that cert-manager creates has another name than the one that the
chart renders, so that neither replaces the other.
*/}}
{{- define "haulout.certificateSecret" -}}
{{- $certificate := .Values.admissionWebhook.certificate -}}
{{- if $certificate.existingSecret -}}
{{- $certificate.existingSecret -}}
{{- else if $certificate.certManager.issuerRef -}}
{{- include "haulout.fullname" . }}-admission-webhook-certificate
{{- else -}}
{{- include "haulout.fullname" . }}-webhook-certificate
{{- end -}}
{{- end -}}

{{/* The built-in evacuator classes that this installation serves, separated by commas, or nothing. */}}
{{- define "haulout.servedClasses" -}}
{{- if and .Values.workloadEvacuator.enabled .Values.evacuationController.enabled -}}deployment.apps.k8s.io{{- end -}}
{{- end -}}

{{/* The argument with these classes, as a JSON list. */}}
{{- define "haulout.servedClassesArgs" -}}
{{- with include "haulout.servedClasses" . -}}
{{- toJson (list (printf "--served-evacuator-classes=%s" .)) -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}

{{/* The rules of a hook that gives moved pods back to their ReplicaSets. */}}
{{- define "haulout.givesPodsBack" -}}
# `delete` is never used. With OwnerReferencesPermissionEnforcement, the API server requires it for changes of owner
# references, and the permission on finalizers for those that block a deletion.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get]
- apiGroups: [apps]
  resources: [replicasets/finalizers]
  verbs: [update]
{{- end -}}
