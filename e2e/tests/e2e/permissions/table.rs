//! The test that needs each permission: it would fail without it.

use std::collections::{BTreeMap, BTreeSet};

use haulout_e2e::rights::line;

const NODE_MAINTENANCE: &str = "nodemaintenance.k8s.io";
const EVACUATION: &str = "evacuation.coordination.k8s.io";
const ELECTED: [&str; 4] = ["list", "watch", "create", "update"];

const DRAIN: &str = "maintenance::lifecycle::stages_act_on_nodes_and_restore_them";
const FAULTS: &str = "maintenance::faults::drain_survives_faults_and_writes_little";
const PLANS: &str = "maintenance::rules::plans_and_rules_decide_the_order";
const EVICTION: &str = "evacuation::evacuators_evictions_budgets_and_cancellation";
const REPLICAS: &str = "evacuation::replicas_restarts_outages_and_slow_watches";
const TAINTS: &str = "taint_manager::pods_leave_as_upstream_and_by_policy";
const TAINT_FAULTS: &str = "taint_manager::faults::deadlines_survive_restarts_and_outages";
const RULES: &str = "admission_rules::every_admission_rule_works_through_kubectl";
const CERTIFICATE: &str = "webhook::certificates::secret_and_ca_bundles_are_restored";
const DEPLOYMENTS: &str = "deployments::pods_of_deployments_are_replaced_before_they_are_evicted";
const CHANGING_DEPLOYMENTS: &str = "deployments::deployments_and_their_pods_change_during_the_replacement";
const OWNERS: &str = "permissions::owner_references::owner_changes_need_permissions_on_pods_and_owners";
const REMOVAL: &str = "installation::uninstall_during_a_drain_leaves_nothing";

/// Every permission that the chart grants, with the test that needs it.
pub(super) fn permissions() -> BTreeMap<String, &'static str> {
    let mut table = BTreeMap::new();
    let mut needs = |service: &str, test: &'static str, group: &str, resource: &str, verbs: &[&str]| {
        for verb in verbs {
            let before = table.insert(line(service, verb, group, resource), test);
            assert_eq!(before, None, "{service} {verb} {resource} twice");
        }
    };
    let (watched, written): (&[&str], &[&str]) = (&["list", "watch"], &["patch"]);

    let service = "maintenance-controller";
    needs(service, DRAIN, NODE_MAINTENANCE, "nodemaintenances", &["list", "watch", "patch", "delete"]);
    needs(service, DRAIN, NODE_MAINTENANCE, "nodemaintenances/status", written);
    needs(service, DRAIN, NODE_MAINTENANCE, "drainrules", watched);
    needs(service, DRAIN, EVACUATION, "evacuations", &["list", "watch", "create"]);
    needs(service, DRAIN, EVACUATION, "evacuations", written);
    needs(service, DRAIN, "", "nodes", &["list", "watch", "patch"]);
    needs(service, DRAIN, "", "nodes/status", written);
    needs(service, DRAIN, "", "namespaces", watched);
    needs(service, DRAIN, "", "pods", watched);
    needs(service, PLANS, "", "persistentvolumeclaims", &["get"]);
    needs(service, PLANS, "", "persistentvolumes", &["get"]);
    needs(service, PLANS, "storage.k8s.io", "volumeattachments", watched);
    needs(service, DRAIN, "events.k8s.io", "events", &["create"]);
    needs(service, DRAIN, "events.k8s.io", "events", written);
    needs(service, FAULTS, "coordination.k8s.io", "leases", &ELECTED);

    let service = "evacuation-controller";
    needs(service, EVICTION, EVACUATION, "evacuations", &["list", "watch", "patch", "delete"]);
    needs(service, EVICTION, EVACUATION, "evacuations/status", written);
    needs(service, EVICTION, "", "pods", &["get", "list", "watch"]);
    needs(service, EVICTION, "", "pods/eviction", &["create"]);
    needs(service, EVICTION, "policy", "poddisruptionbudgets", watched);
    needs(service, EVICTION, "events.k8s.io", "events", &["create"]);
    needs(service, EVICTION, "events.k8s.io", "events", written);
    needs(service, REPLICAS, "coordination.k8s.io", "leases", &ELECTED);

    let service = "taint-manager";
    needs(service, TAINTS, "", "nodes", &["list", "watch", "patch"]);
    needs(service, TAINTS, "", "namespaces", watched);
    needs(service, TAINTS, "", "events", watched);
    needs(service, TAINTS, "", "pods", &["list", "watch", "delete"]);
    needs(service, TAINTS, "", "pods", &["get"]);
    needs(service, TAINTS, "", "pods/status", written);
    needs(service, TAINTS, "", "pods/eviction", &["create"]);
    needs(service, TAINTS, EVACUATION, "evacuations", &["get", "list", "watch", "create", "patch"]);
    needs(service, TAINTS, "events.k8s.io", "events", &["create"]);
    needs(service, TAINT_FAULTS, "events.k8s.io", "events", written);
    needs(service, TAINT_FAULTS, "coordination.k8s.io", "leases", &ELECTED);

    let service = "admission-webhook";
    needs(service, CERTIFICATE, "", "secrets", watched);
    needs(service, RULES, NODE_MAINTENANCE, "nodemaintenances", watched);
    needs(service, RULES, NODE_MAINTENANCE, "drainrules", watched);
    needs(service, RULES, "", "pods", &["get", "list", "watch"]);
    needs(service, RULES, "", "nodes", watched);
    needs(service, RULES, "authorization.k8s.io", "subjectaccessreviews", &["create"]);

    let service = "certificate-manager";
    needs(service, CERTIFICATE, "", "secrets", &["list", "watch", "update"]);
    for resource in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
        needs(service, CERTIFICATE, "admissionregistration.k8s.io", resource, &["list", "watch", "patch"]);
    }
    needs(service, CERTIFICATE, "coordination.k8s.io", "leases", &ELECTED);

    let service = "workload-evacuator";
    needs(service, DEPLOYMENTS, EVACUATION, "evacuations", &["list", "watch", "patch"]);
    needs(service, CHANGING_DEPLOYMENTS, EVACUATION, "evacuations", &["create"]);
    needs(service, DEPLOYMENTS, EVACUATION, "evacuations/status", written);
    needs(service, RULES, EVACUATION, "evacuators", &["report"]);
    needs(service, DEPLOYMENTS, "", "pods", &["get", "list", "watch", "patch"]);
    needs(service, OWNERS, "", "pods", &["delete"]);
    needs(service, OWNERS, "apps", "replicasets/finalizers", &["update"]);
    needs(service, DEPLOYMENTS, "apps", "deployments", watched);
    needs(service, DEPLOYMENTS, "apps", "replicasets", watched);
    needs(service, DEPLOYMENTS, "", "namespaces", watched);
    needs(service, DEPLOYMENTS, "", "persistentvolumeclaims", &["get"]);
    needs(service, DEPLOYMENTS, "events.k8s.io", "events", &["create"]);
    needs(service, DEPLOYMENTS, "events.k8s.io", "events", written);
    needs(service, DEPLOYMENTS, "coordination.k8s.io", "leases", &ELECTED);

    let service = "cleanup";
    needs(service, REMOVAL, EVACUATION, "evacuations", &["list", "patch", "delete"]);
    needs(service, REMOVAL, "", "pods", &["get"]);
    needs(service, REMOVAL, NODE_MAINTENANCE, "nodemaintenances", &["list", "patch"]);
    needs(service, REMOVAL, "", "nodes", &["list", "patch"]);
    needs(service, REMOVAL, "", "nodes/status", written);
    for resource in ["clusterrolebindings", "rolebindings"] {
        needs(service, REMOVAL, "rbac.authorization.k8s.io", resource, &["delete"]);
    }
    needs(service, REMOVAL, "coordination.k8s.io", "leases", &["delete"]);
    needs(service, REMOVAL, "", "secrets", &["delete"]);

    let service = "withdraw";
    needs(service, REMOVAL, EVACUATION, "evacuations", &["list", "patch"]);

    for service in ["cleanup", "withdraw"] {
        needs(service, REMOVAL, "", "pods", &["list", "patch"]);
        needs(service, REMOVAL, "apps", "replicasets", &["get"]);
        needs(service, OWNERS, "", "pods", &["delete"]);
        needs(service, OWNERS, "apps", "replicasets/finalizers", &["update"]);
    }

    let service = "check";
    needs(service, REMOVAL, "coordination.k8s.io", "leases", watched);
    needs(service, REMOVAL, NODE_MAINTENANCE, "nodemaintenances", &["create"]);
    table
}

/// The permissions that the API server checks while it handles other requests: reports need `report`, and with
/// OwnerReferencesPermissionEnforcement, changes of owner references need permissions on pods and owners. The audit log does
/// not show that they are used.
pub(super) fn checked_in_other_requests() -> BTreeSet<String> {
    let all = permissions().into_iter();
    let some = all.filter(|(permission, test)| *test == OWNERS || permission.contains(": report "));
    some.map(|(permission, _)| permission).collect()
}
