{{/*
The objects of a service, except its own ClusterRole. Takes a dict of root, the service's name, its values, and
optionally: args, a list; ports, volumeMounts and volumes, lists in addition to the metrics port.
*/}}
{{- define "haulout.serviceName" -}}
{{- printf "%s-%s" (include "haulout.fullname" .root) .name -}}
{{- end -}}

{{- define "haulout.serviceClusterName" -}}
{{- printf "%s-%s" (include "haulout.clusterName" .root) .name -}}
{{- end -}}

{{- define "haulout.serviceSelector" -}}
{{ include "haulout.selector" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "haulout.serviceLabels" -}}
{{ include "haulout.labels" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{/* The metadata of a namespaced object, such as a ServiceAccount or Role. */}}
{{- define "haulout.serviceMetadata" -}}
name: {{ include "haulout.serviceName" . }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "haulout.serviceLabels" . | nindent 2 }}
{{- end -}}

{{/* The metadata of a cluster-scoped object, such as a ClusterRole. */}}
{{- define "haulout.serviceClusterMetadata" -}}
name: {{ include "haulout.serviceClusterName" . }}
labels:
  {{- include "haulout.serviceLabels" . | nindent 2 }}
{{- end -}}

{{- define "haulout.serviceSubject" -}}
- kind: ServiceAccount
  name: {{ include "haulout.serviceName" . }}
  namespace: {{ .root.Release.Namespace | quote }}
{{- end -}}

{{/* The image of a service, whose key in values.yaml is its name in camel case, or of the hooks. */}}
{{- define "haulout.image" -}}
{{- $image := .root.Values.image -}}
{{- $values := eq .name "chart-hooks" | ternary "cleanup" (.name | replace "-" " " | title | nospace | untitle) -}}
{{- $digest := (get .root.Values $values).digest -}}
{{- printf "%s%s/%s:%s" (empty $image.registry | ternary "" (printf "%s/" $image.registry)) $image.repository .name (default .root.Chart.AppVersion $image.tag) -}}
{{- with $digest -}}@{{ . }}{{- end -}}
{{- end -}}

{{/* The part of a pod spec that services, hooks and the test share. */}}
{{- define "haulout.podSpec" -}}
serviceAccountName: {{ include "haulout.serviceName" . }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with (.values | default dict).nodeSelector | default .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "haulout.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{- define "haulout.podEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end -}}

{{/* The name of a service's Lease. The service has the same name built in. */}}
{{- define "haulout.leaseName" -}}
haulout-{{ .name }}
{{- end -}}

{{- define "haulout.service" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
# The pods mount the token explicitly.
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  {{- include "haulout.serviceClusterMetadata" . | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ include "haulout.serviceClusterName" . }}
subjects:
  {{- include "haulout.serviceSubject" . | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ include "haulout.serviceName" . }}
subjects:
  {{- include "haulout.serviceSubject" . | nindent 2 }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
spec:
  replicas: {{ .values.replicas }}
  selector:
    matchLabels:
      {{- include "haulout.serviceSelector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "haulout.serviceLabels" . | nindent 8 }}
    spec:
      {{- include "haulout.podSpec" . | nindent 6 }}
      topologySpreadConstraints:
        {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels:
              {{- include "haulout.serviceSelector" $ | nindent 14 }}
        {{- end }}
      containers:
        - name: {{ .name }}
          image: {{ include "haulout.image" . }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          {{- with concat (default list .args) .values.extraArgs }}
          args:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          env:
            {{- include "haulout.podEnv" . | nindent 12 }}
          ports:
            - name: metrics
              containerPort: 8080
            {{- with .ports }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          livenessProbe:
            httpGet:
              path: /livez
              port: metrics
          readinessProbe:
            httpGet:
              path: /readyz
              port: metrics
            periodSeconds: 2
          resources:
            {{- toYaml .values.resources | nindent 12 }}
          securityContext:
            {{- include "haulout.containerSecurity" . | nindent 12 }}
          {{- with .volumeMounts }}
          volumeMounts:
            {{- toYaml . | nindent 12 }}
          {{- end }}
      {{- with .volumes }}
      volumes:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- with .root.Values.networkPolicy }}
{{- if .enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "haulout.serviceMetadata" $ | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "haulout.serviceSelector" $ | nindent 6 }}
  policyTypes: [{{ empty .egress | ternary "Ingress" "Ingress, Egress" }}]
  ingress:
    - ports:
        - port: metrics
      {{- with .metricsFrom }}
      from:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- range $.ports }}
    # From anywhere: API servers have no labels, and often no address in the cluster.
    - ports:
        - port: {{ .name }}
    {{- end }}
  {{- with .egress }}
  egress:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- if gt (int .values.replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "haulout.serviceSelector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* The Role of a service with leader election, and with the rules of the service, if it has any. */}}
{{- define "haulout.leaseRole" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
rules:
  # RBAC cannot restrict create requests by name.
  - apiGroups: [coordination.k8s.io]
    resources: [leases]
    verbs: [create]
  - apiGroups: [coordination.k8s.io]
    resources: [leases]
    resourceNames: [{{ include "haulout.leaseName" . }}]
    verbs: [list, watch, update]
  {{- with .rules }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/*
The ServiceAccount of a hook with its own ClusterRole, and its Job, which runs the image chart-hooks.
Takes a dict of root, the hook's name, its annotations as "hook", and the arguments of the program as "args".
*/}}
{{- define "haulout.hookAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
  annotations: {{ toJson .hook }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  {{- include "haulout.serviceClusterMetadata" . | nindent 2 }}
  annotations: {{ toJson .hook }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ include "haulout.serviceClusterName" . }}
subjects:
  {{- include "haulout.serviceSubject" . | nindent 2 }}
{{- end -}}

{{- define "haulout.hookJob" -}}
apiVersion: batch/v1
kind: Job
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
  annotations: {{ toJson (merge (dict "helm.sh/hook-weight" "0") .hook) }}
spec:
  backoffLimit: 3
  # Less than Helm's timeout of five minutes, so that Helm reports the Job's failure.
  activeDeadlineSeconds: 240
  template:
    metadata:
      labels:
        {{- include "haulout.serviceLabels" . | nindent 8 }}
    spec:
      {{- include "haulout.podSpec" . | nindent 6 }}
      restartPolicy: Never
      containers:
        - name: {{ .name }}
          image: {{ include "haulout.image" (dict "root" .root "name" "chart-hooks") }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args:
            {{- range .args }}
            - {{ . }}
            {{- end }}
          env:
            {{- include "haulout.podEnv" .root | nindent 12 }}
          resources:
            {{- toYaml .root.Values.cleanup.resources | nindent 12 }}
          securityContext:
            {{- include "haulout.containerSecurity" .root | nindent 12 }}
{{- end -}}
