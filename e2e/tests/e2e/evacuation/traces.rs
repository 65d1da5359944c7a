//! Traces, as a collector receives them.

use std::sync::Mutex;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::trace::v1::Span;

use super::*;

/// A collector that stores all spans.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let resources = request.into_inner().resource_spans.into_iter();
        let spans = resources.flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans);
        self.0.lock().unwrap().extend(spans);
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Listens. Returns the address.
    async fn listen(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(self.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(service.clone());
                tokio::spawn(async move {
                    let http = auto::Builder::new(TokioExecutor::new()).http2_only();
                    // The service may stop at any time.
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        format!("http://{address}")
    }
}

fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    let value = found.and_then(|attribute| attribute.value.clone()).and_then(|value| value.value);
    match value {
        Some(any_value::Value::StringValue(text)) => text,
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

pub async fn reconcile_is_a_span_with_its_requests_as_children(env: &TestEnv) {
    let collector = Collector::default();
    let endpoint = collector.listen().await;
    let args = ["--lease-seconds", "30", "--otlp-endpoint", &endpoint, "--trace-sampling", "1"];
    let controller = Service::start(&env.cluster, "evacuation-controller", &args).await.unwrap();
    controller.leads().await.unwrap();
    let test = env.test_namespace(&Arc::new(controller)).await;
    let pod = test.pod("web-1", &[]).await;
    let name = test.evacuate(&pod).await;
    let evicts = |request: &&Span| {
        request.name == "request"
            && attribute(request, "path").ends_with("/pods/web-1/eviction")
            && attribute(request, "verb") == "create"
            && attribute(request, "code") == "201"
    };
    let traced = wait::eventually("the eviction is traced", SOON, async || {
        let spans = collector.0.lock().unwrap().clone();
        let Some(request) = spans.iter().find(evicts) else { return Ok(None) };
        Ok(spans.iter().find(|span| span.span_id == request.parent_span_id).cloned())
    });
    let reconcile = traced.await.unwrap();
    assert_eq!(reconcile.name, "reconcile");
    let about = ["queue", "namespace", "name"].map(|key| attribute(&reconcile, key));
    assert_eq!(about, ["evacuations", &test.namespace, &name]);
    let requests: Vec<_> = collector.0.lock().unwrap().clone();
    let strays = requests.iter().filter(|span| span.name == "request" && span.parent_span_id.is_empty());
    assert_eq!(strays.count(), 0, "requests outside of a reconcile are not traced");
    test.end().await;
}
