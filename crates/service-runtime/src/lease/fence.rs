//! A client that rejects writes without leadership.
//!
//! The fence checks leadership when a request starts and whenever it continues, so that it also stops retries inside
//! the client. It cannot stop a request that the kernel has already sent. Writes that depend on the object's state
//! therefore also carry a resourceVersion.

use std::error::Error as _;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use tower::{BoxError, service_fn};

use super::leadership::Leadership;

/// Why the fence rejected a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotLeading {
    /// The request was not sent.
    #[error("did not send {method} {path}: {identity} does not hold Lease {lease}")]
    NotSent {
        /// The method of the request.
        method: Method,
        /// Its path.
        path: String,
        /// The identity of the sender.
        identity: String,
        /// The Lease as `namespace/name`.
        lease: String,
    },
    /// The request was aborted while in flight.
    #[error("aborted {method} {path}, which may have taken effect: {identity} lost Lease {lease}")]
    Lost {
        /// The method of the request.
        method: Method,
        /// Its path.
        path: String,
        /// The identity of the sender.
        identity: String,
        /// The Lease as `namespace/name`.
        lease: String,
    },
}

impl NotLeading {
    /// The fence's error, if the fence rejected this request.
    pub fn find(error: &kube::Error) -> Option<&Self> {
        match error {
            kube::Error::Service(error) => error.downcast_ref(),
            other => other.source().and_then(|source| source.downcast_ref()),
        }
    }
}

pub(super) fn fence(client: &Client, leadership: &Leadership) -> Client {
    let (inner, leadership) = (client.clone(), leadership.clone());
    let service = service_fn(move |request| send(inner.clone(), leadership.clone(), request));
    Client::new(service, client.default_namespace()).with_valid_until(*client.valid_until())
}

/// Sends a request. Writes are sent only while leadership is held.
async fn send(
    client: Client,
    leadership: Leadership,
    request: Request<Body>,
) -> Result<Response<Body>, BoxError> {
    let method = request.method().clone();
    if method == Method::GET || method == Method::HEAD {
        return Ok(client.send(request).await?);
    }
    let path = request.uri().path().to_owned();
    let (identity, lease) = (leadership.identity().to_owned(), leadership.lease().to_owned());
    if !leadership.is_held() {
        return Err(NotLeading::NotSent { method, path, identity, lease }.into());
    }
    let mut answer = pin!(client.send(request));
    let mut lost = pin!(leadership.lost());
    let passed = poll_fn(|context| {
        // After a freeze of the process, this future can be polled before its timers.
        if !leadership.is_held() || lost.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        answer.as_mut().poll(context).map(Some)
    });
    match passed.await {
        Some(answer) => Ok(answer?),
        None => Err(NotLeading::Lost { method, path, identity, lease }.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use kube::api::{DeleteParams, Patch, PatchParams, PostParams};

    use super::super::moment::Moment;
    use super::*;

    /// A client whose server counts requests, and answers them or never does.
    fn client(answers: bool) -> (Client, Arc<AtomicUsize>) {
        let sent = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&sent);
        let service = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::Relaxed);
            async move {
                if !answers {
                    std::future::pending::<()>().await;
                }
                let map = serde_json::to_vec(&ConfigMap::default()).unwrap();
                Ok::<_, Infallible>(Response::new(Body::from(map)))
            }
        });
        (Client::new(service, "test"), sent)
    }

    fn leadership(left: Duration) -> Leadership {
        Leadership::new("test/lease", "me", Moment::now() + left)
    }

    #[tokio::test]
    async fn reads_always_pass_and_writes_only_while_leading() {
        let (plain, sent) = client(true);
        let leadership = leadership(Duration::from_secs(60));
        let maps: Api<ConfigMap> = Api::default_namespaced(leadership.fence(&plain));
        maps.create(&PostParams::default(), &ConfigMap::default()).await.unwrap();
        maps.get("x").await.unwrap();
        leadership.end();
        maps.get("x").await.unwrap();
        assert_eq!(sent.load(Ordering::Relaxed), 3);

        let patch = Patch::Merge(serde_json::json!({}));
        let rejections = [
            maps.create(&PostParams::default(), &ConfigMap::default()).await.map(|_| ()).unwrap_err(),
            maps.replace("x", &PostParams::default(), &ConfigMap::default()).await.map(|_| ()).unwrap_err(),
            maps.patch("x", &PatchParams::default(), &patch).await.map(|_| ()).unwrap_err(),
            maps.delete("x", &DeleteParams::default()).await.map(|_| ()).unwrap_err(),
        ];
        assert_eq!(sent.load(Ordering::Relaxed), 3, "nothing more was sent");
        let methods = rejections.map(|error| match NotLeading::find(&error) {
            Some(NotLeading::NotSent { method, .. }) => method.clone(),
            other => panic!("{error}: {other:?}"),
        });
        assert_eq!(methods, [Method::POST, Method::PUT, Method::PATCH, Method::DELETE]);
    }

    #[tokio::test]
    async fn fence_rejects_writes_after_the_deadline() {
        let (plain, sent) = client(true);
        let maps: Api<ConfigMap> = Api::default_namespaced(leadership(Duration::ZERO).fence(&plain));
        let error = maps.create(&PostParams::default(), &ConfigMap::default()).await.unwrap_err();
        assert!(matches!(NotLeading::find(&error), Some(NotLeading::NotSent { .. })), "{error}");
        assert_eq!(sent.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn request_in_flight_is_aborted_when_leadership_is_lost() {
        let (plain, sent) = client(false);
        let leadership = leadership(Duration::from_secs(600));
        let maps: Api<ConfigMap> = Api::default_namespaced(leadership.fence(&plain));
        let params = DeleteParams::default();
        let lose = async {
            // Wait until the request is in flight.
            while sent.load(Ordering::Relaxed) == 0 {
                tokio::task::yield_now().await;
            }
            leadership.end();
        };
        let (answer, ()) = tokio::join!(maps.delete("x", &params), lose);
        let error = answer.map(|_| ()).unwrap_err();
        assert_eq!(sent.load(Ordering::Relaxed), 1);
        let reason = NotLeading::find(&error).unwrap().to_string();
        assert_eq!(
            reason,
            "aborted DELETE /api/v1/namespaces/test/configmaps/x, which may have taken effect: \
             me lost Lease test/lease"
        );
    }
}
