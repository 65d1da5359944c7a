//! Logs for people on a terminal and as JSON elsewhere, and traces where somebody collects them.

use std::io::IsTerminal as _;
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use thiserror::Error;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

/// What is logged unless `RUST_LOG` says otherwise. Kube logs every request that fails; whoever made it
/// tells more.
const DEFAULT_FILTER: &str = "info,kube_client::client::builder=off";

/// What logs look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// For people.
    Text,
    /// For machines, one object a line.
    Json,
}

/// Why telemetry could not begin.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// The collector's address makes no sense.
    #[error("--otlp-endpoint {endpoint}: {source}")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong with it.
        source: opentelemetry_otlp::ExporterBuildError,
    },
    /// `RUST_LOG` makes no sense.
    #[error("RUST_LOG: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
}

/// Sends what is left of the traces when it is dropped.
#[derive(Debug, Default)]
pub struct Telemetry(Option<SdkTracerProvider>);

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = self.0.take() {
            // The collector may be gone; there is nobody left to tell.
            let _ = provider.shutdown_with_timeout(Duration::from_secs(1));
        }
    }
}

/// Begins logging and, given an endpoint, tracing: of all traces the share `sampling`, from 0 to 1. Needs to
/// run inside the async runtime. `RUST_LOG` chooses what is logged.
pub fn begin(
    service: &'static str,
    format: LogFormat,
    endpoint: Option<&str>,
    sampling: f64,
) -> Result<Telemetry, TelemetryError> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(filter) => EnvFilter::try_new(filter)?,
        Err(_) => EnvFilter::new(DEFAULT_FILTER),
    };
    let to_people = match format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let colour = to_people && std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = fmt::layer().with_writer(std::io::stderr);
    let logs = if to_people {
        lines.with_ansi(colour).boxed()
    } else {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
    };
    let provider = endpoint.map(|endpoint| traces(service, endpoint, sampling)).transpose()?;
    let spans = provider
        .as_ref()
        .map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer(service)));
    // Only a second start in the same process finds a subscriber already there, and then keeps that one.
    let _ = tracing_subscriber::registry().with(filter).with(logs).with(spans).try_init();
    Ok(Telemetry(provider))
}

fn traces(service: &'static str, endpoint: &str, sampling: f64) -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .map_err(|source| TelemetryError::Endpoint { endpoint: endpoint.into(), source })?;
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sampling))))
        .with_resource(Resource::builder().with_service_name(format!("haulout-{service}")).build())
        .build())
}
