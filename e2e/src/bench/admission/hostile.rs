//! How invalid requests affect the webhook's memory: tens of thousands of bodies that are not reviews, or oversized
//! ones.

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::Client;

use super::{IN_FLIGHT, Progress};
use crate::service::Service;

/// Number of bodies before each memory measurement.
const STAGE: usize = 10_000;
/// One body in this many is large, and one in `HUGE` of those exceeds the size limit.
const LARGE: usize = 100;
const HUGE: usize = 10;

/// Resident MiB after each of four stages of 10,000 bodies. A leak would make it grow with every stage.
pub(super) async fn run(webhook_client: &Client, replica: &Service, progress: Progress) -> Result<[f64; 4]> {
    let mut random = fastrand::Rng::with_seed(7);
    let mut resident = [0.0; 4];
    for (stage, sample) in resident.iter_mut().enumerate() {
        let bodies = (0..STAGE).map(|number| body(&mut random, number));
        stream::iter(bodies)
            .map(|body| send(webhook_client, body))
            .buffer_unordered(IN_FLIGHT)
            .try_for_each(async |()| Ok(()))
            .await?;
        *sample = replica.resident_bytes()? / 1024.0 / 1024.0;
        progress(&format!("{} bodies of garbage: {sample:.1} MiB", (stage + 1) * STAGE));
    }
    Ok(resident)
}

/// Sends a body. The webhook must answer it, and no answer may admit anything.
async fn send(webhook_client: &Client, body: Vec<u8>) -> Result<()> {
    let large = body.len() > 2 << 20;
    let request = http::Request::post("/validate/evacuations?timeout=10s").body(body).context("a request")?;
    match webhook_client.request_text(request).await {
        Ok(answer) => ensure!(!answer.contains("\"allowed\":true"), "the webhook says {answer}"),
        // The answer may arrive before the whole body is sent, and be lost.
        Err(kube::Error::Api(_)) => {}
        Err(error) => ensure!(large, "no answer: {error}"),
    }
    Ok(())
}

fn body(random: &mut fastrand::Rng, number: usize) -> Vec<u8> {
    if number.is_multiple_of(LARGE * HUGE) {
        return wrap(&format!("{{\"metadata\":{{\"labels\":{{{}}}}}}}", labels(250_000)));
    }
    if number.is_multiple_of(LARGE) {
        return wrap(&format!("{{\"metadata\":{{\"labels\":{{{}}}}}}}", labels(50_000)));
    }
    match random.u8(0..6) {
        0 => (0..random.usize(0..2000)).map(|_| random.u8(..)).collect(),
        1 => "[".repeat(random.usize(1..20_000)).into_bytes(),
        2 => {
            let mut cut = wrap("{\"spec\":{}}");
            cut.truncate(random.usize(..cut.len()));
            cut
        }
        3 => wrap("{\"spec\":\"x\",\"metadata\":[]}"),
        4 => wrap("null"),
        _ => format!("{{\"request\":{}}}", labels(random.usize(0..50))).into_bytes(),
    }
}

fn labels(count: usize) -> String {
    (0..count).map(|number| format!("\"l{number}\":\"\"")).collect::<Vec<_>>().join(",")
}

fn wrap(object: &str) -> Vec<u8> {
    let resource = "{\"group\":\"evacuation.coordination.k8s.io\",\"version\":\"v1alpha1\",\"resource\":\"evacuations\"}";
    let review = format!(
        "{{\"apiVersion\":\"admission.k8s.io/v1\",\"kind\":\"AdmissionReview\",\"request\":{{\"uid\":\"u\",\
         \"resource\":{resource},\"kind\":{{\"group\":\"\",\"version\":\"v1\",\"kind\":\"X\"}},\"name\":\"x\",\
         \"namespace\":\"default\",\"operation\":\"CREATE\",\"userInfo\":{{\"username\":\"mallory\"}},\"object\":{object}}}}}"
    );
    review.into_bytes()
}
