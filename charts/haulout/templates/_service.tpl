{{/*
What every service has beside its own ClusterRole. Takes a dict of root, the service's name, its values, and
optionally: args, a list; ports, volumeMounts and volumes, lists of what the pod has beyond the metrics port.
*/}}
{{- define "haulout.serviceName" -}}
{{- printf "%s-%s" (include "haulout.fullname" .root) .name -}}
{{- end -}}

{{- define "haulout.serviceClusterName" -}}
{{- printf "%s-%s" (include "haulout.clusterName" .root) .name -}}
{{- end -}}

{{- define "haulout.serviceSelector" -}}
app.kubernetes.io/name: haulout
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "haulout.serviceLabels" -}}
{{ include "haulout.labels" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{/* The metadata of a ServiceAccount, Role and the like in the release's namespace. */}}
{{- define "haulout.serviceMetadata" -}}
name: {{ include "haulout.serviceName" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "haulout.serviceLabels" . | nindent 2 }}
{{- end -}}

{{/* The metadata of its ClusterRole. */}}
{{- define "haulout.serviceClusterMetadata" -}}
name: {{ include "haulout.serviceClusterName" . }}
labels:
  {{- include "haulout.serviceLabels" . | nindent 2 }}
{{- end -}}

{{- define "haulout.serviceSubject" -}}
- kind: ServiceAccount
  name: {{ include "haulout.serviceName" . }}
  namespace: {{ .root.Release.Namespace }}
{{- end -}}

{{- define "haulout.image" -}}
{{- $image := .root.Values.image -}}
{{- printf "%s%s/%s:%s" (empty $image.registry | ternary "" (printf "%s/" $image.registry)) $image.repository .name (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{- define "haulout.service" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
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
      serviceAccountName: {{ include "haulout.serviceName" . }}
      priorityClassName: system-cluster-critical
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        seccompProfile:
          type: RuntimeDefault
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "haulout.serviceSelector" . | nindent 14 }}
      containers:
        - name: {{ .name }}
          image: {{ include "haulout.image" . }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          {{- with concat (default list .args) .values.extraArgs }}
          args:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          env:
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            - name: POD_NAMESPACE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.namespace
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
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
            readOnlyRootFilesystem: true
          {{- with .volumeMounts }}
          volumeMounts:
            {{- toYaml . | nindent 12 }}
          {{- end }}
      {{- with .volumes }}
      volumes:
        {{- toYaml . | nindent 8 }}
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

{{/* What a service that stands for election may do in the release's namespace. */}}
{{- define "haulout.leaseRole" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- include "haulout.serviceMetadata" . | nindent 2 }}
rules:
  - apiGroups: [coordination.k8s.io]
    resources: [leases]
    verbs: [get, list, watch, create, update]
{{- end -}}
