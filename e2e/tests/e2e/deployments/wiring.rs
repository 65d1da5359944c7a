//! The built-in classes that the chart's values serve reach every service that requests evacuations.

use haulout_e2e::Webhook;
use haulout_e2e::service::chart_args;

use super::*;

const FLAG: &str = "--served-evacuator-classes";

/// The arguments about served classes that the chart gives to a service.
async fn served(cluster: &Cluster, service: &str) -> Vec<String> {
    let args = chart_args(cluster, service).await.unwrap().unwrap();
    args.into_iter().filter(|arg| arg.starts_with(FLAG)).collect()
}

/// All services, with the arguments about served classes from the chart.
struct Installation {
    env: Env,
    _taint_manager: Service,
}

impl Installation {
    async fn boot(name: &str, values: &[(&str, &str)]) -> Self {
        let cluster = Cluster::builder().name(name).audit(true).taint_eviction(false).boot().await.unwrap();
        let values = [&[("taintManager.enabled", "true")], values].concat();
        let webhook = Webhook::install(&cluster, &values).await.unwrap();
        let replica = webhook.start(&cluster, &[]).await.unwrap();
        Webhook::reachable(&cluster).await.unwrap();
        let args = served(&cluster, "taint-manager").await;
        for service in ["maintenance-controller", "evacuation-controller", "admission-webhook"] {
            assert_eq!(served(&cluster, service).await, args, "{service}");
        }
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let now = ["--lease-seconds", "30", "--watch-gap-grace-seconds", "0"];
        let taint_manager =
            Service::start(&cluster, "taint-manager", &[&now, args.as_slice()].concat()).await;
        let taint_manager = taint_manager.unwrap();
        taint_manager.leads().await.unwrap();
        // Without its values, the chart has no account for it.
        let evacuator = if args.is_empty() { None } else { Some(start(&cluster, &[]).await) };
        let env = TestEnv::on(cluster, Some((webhook, replica)), "30", &args).await;
        Self {
            env: Env { env, evacuator: Mutex::new(evacuator.map(Arc::new)) },
            _taint_manager: taint_manager,
        }
    }

    /// A pod leaves node `a` because of a maintenance, a taint, or an Evacuation that somebody else requests. Returns its first
    /// Evacuation.
    async fn leaves(&self, name: &'static str, budget: bool, request: Request) -> (Evacuation, App<'_>) {
        let deployment =
            objects::deployment("web").pods(|pod| pod.label(names::TAINT_ACTION_LABEL, "Evacuate"));
        let app = App::with(&self.env, name, &["a", "b"], deployment).await;
        if budget {
            app.budget(
                objects::pdb("web").max_unavailable("0").namespace(name).selects("app", "web").build(),
            )
            .await;
        }
        app.open(&["b"]).await;
        let pod = app.pod().await;
        let requested = app.until_evacuation(&pod, "exists", |_| true);
        let (evacuation, ()) = tokio::join!(requested, request.send(&app, &pod));
        app.scenario.until_pod_gone(&pod.name_any()).await;
        (evacuation, app)
    }
}

/// Who requests that a pod leaves.
#[derive(Clone, Copy, Debug)]
enum Request {
    Maintenance,
    Taint,
    /// An Evacuation without evacuators, which the webhook completes.
    Somebody,
}

impl Request {
    const ALL: [Self; 3] = [Self::Maintenance, Self::Taint, Self::Somebody];

    async fn send(self, app: &App<'_>, pod: &Pod) {
        match self {
            Self::Maintenance => app.drain().await,
            Self::Taint => {
                let taints = json!([{"key": "example.com/broken", "effect": "NoExecute"}]);
                app.scenario.patch_node("a", json!({"spec": {"taints": taints}})).await;
            }
            Self::Somebody => {
                app.scenario.patch_node("a", json!({"spec": {"unschedulable": true}})).await;
                let mut requested = rejection::evacuation(pod, "descheduler.example.com");
                requested.spec.evacuators.clear();
                app.scenario.evacuations().create(&PostParams::default(), &requested).await.unwrap();
            }
        }
    }
}

fn classes(evacuation: &Evacuation) -> Vec<&str> {
    evacuation.spec.evacuators.iter().map(|evacuator| evacuator.evacuator_class.as_str()).collect()
}

/// The budget of each pod only allows that it is replaced.
pub async fn served_class_reaches_every_instigator() {
    let installation = Installation::boot("deployments-served", &[]).await;
    for (request, name) in Request::ALL.into_iter().zip(["by-maintenance", "by-taint", "by-somebody"]) {
        let (evacuation, app) = installation.leaves(name, true, request).await;
        assert_eq!(classes(&evacuation), [class::DEPLOYMENT], "{request:?}");
        let note = app.until_event(names::event::POD_REPLACED).await;
        assert!(note.contains(&evacuation.spec.pod_ref.name), "{note}");
        app.until_pods("are as before", |pods| pods.len() == 1 && pods.iter().all(is_untouched)).await;
        app.is_as_before().await;
    }
}

pub async fn class_that_is_not_served_is_named_by_nobody() {
    let installation =
        Installation::boot("deployments-unserved", &[("workloadEvacuator.enabled", "false")]).await;
    for (request, name) in Request::ALL.into_iter().zip(["by-maintenance", "by-taint", "by-somebody"]) {
        let (evacuation, app) = installation.leaves(name, false, request).await;
        assert!(classes(&evacuation).is_empty(), "{request:?}: {evacuation:?}");
        app.until_pods("are as before", |pods| pods.len() == 1 && pods.iter().all(is_untouched)).await;
        app.is_as_before().await;
    }
}
