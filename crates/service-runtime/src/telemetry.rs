//! Logs, as text on a terminal and as JSON elsewhere, and traces for an OTLP collector.

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

/// The default of `RUST_LOG`. Kube's log of failed requests is off, because the callers log them with more details.
const DEFAULT_FILTER: &str = "info,kube_client::client::builder=off";

/// Log format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Why telemetry could not start.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// The address of the collector is invalid.
    #[error("invalid --otlp-endpoint {endpoint}: {source}")]
    Endpoint {
        /// The given address.
        endpoint: String,
        /// What is wrong with it.
        source: opentelemetry_otlp::ExporterBuildError,
    },
    /// `RUST_LOG` is invalid.
    #[error("invalid RUST_LOG: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
}

/// Sends the remaining traces when it is dropped.
#[derive(Debug, Default)]
pub struct Telemetry(Option<SdkTracerProvider>);

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = self.0.take() {
            // The collector may be gone. The service exits, so the error is ignored.
            let _ = provider.shutdown_with_timeout(Duration::from_secs(1));
        }
    }
}

/// Starts logging and, with an endpoint, tracing. `sampling` is the fraction of traces that are sent, from 0 to 1. It
/// must run inside the async runtime. `RUST_LOG` sets the log filter.
pub fn init(
    service: &'static str,
    format: LogFormat,
    endpoint: Option<&str>,
    sampling: f64,
) -> Result<Telemetry, TelemetryError> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(filter) => EnvFilter::try_new(filter)?,
        Err(_) => EnvFilter::new(DEFAULT_FILTER),
    };
    let is_text = match format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let colour = is_text && std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = fmt::layer().with_writer(std::io::stderr);
    let logs = if is_text {
        lines.with_ansi(colour).boxed()
    } else {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
    };
    let provider = endpoint.map(|endpoint| traces(service, endpoint, sampling)).transpose()?;
    let spans = provider
        .as_ref()
        .map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer(service)));
    // This fails only on a second start in the same process, which keeps the first subscriber.
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
