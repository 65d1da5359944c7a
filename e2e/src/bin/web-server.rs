//! A web server for pods on real nodes. It responds to every request with its name. On SIGTERM it accepts no more
//! connections, responds to the requests that it has received, and exits.

use anyhow::{Context as _, Result};
use axum::Router;
use axum::routing::get;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// A web server that responds with its name.
#[derive(Parser)]
struct Args {
    /// Name in every response
    #[arg(long)]
    name: String,
    /// Port to listen on
    #[arg(long)]
    port: u16,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Args { name, port } = Args::parse();
    let mut stop = signal(SignalKind::terminate()).context("failed to handle SIGTERM")?;
    let listener = TcpListener::bind(("0.0.0.0", port)).await;
    let listener = listener.with_context(|| format!("failed to listen on port {port}"))?;
    let router = Router::new().route("/", get(async move || name.clone()));
    let stopped = async move {
        stop.recv().await;
    };
    axum::serve(listener, router).with_graceful_shutdown(stopped).await.context("failed to serve")
}
