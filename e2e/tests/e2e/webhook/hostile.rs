//! Invalid data on the wire to the real binary: everything is answered or disconnected, and memory does not grow.

use std::net::SocketAddr;

use haulout_e2e::service::Service;
use haulout_e2e::{Webhook, wait, webhook};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{SOON, cluster, connector};

struct Client {
    connector: TlsConnector,
    address: SocketAddr,
}

impl Client {
    async fn connect(&self) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from(webhook::HOST).unwrap();
        self.connector.connect(name, stream).await.unwrap()
    }

    /// The status code of the answer and its body.
    async fn post(&self, path: &str, body: &[u8]) -> (u16, String) {
        let mut stream = self.connect().await;
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A server may answer before the whole body is written.
        let _ = stream.write_all(body).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
        (code, body)
    }
}

fn review(resource: &str, group: &str, object: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "kind": {"group": group, "version": "v1", "kind": "X"},
            "resource": {"group": group, "version": "v1", "resource": resource},
            "name": "x",
            "namespace": "default",
            "operation": "CREATE",
            "userInfo": {"username": "mallory"},
            "object": object
        }
    })
}

/// The paths and their kinds.
const HOOKS: [(&str, &str, &str); 7] = [
    ("/mutate/evacuations", "evacuations", "evacuation.coordination.k8s.io"),
    ("/validate/evacuations", "evacuations", "evacuation.coordination.k8s.io"),
    ("/mutate/nodemaintenances", "nodemaintenances", "nodemaintenance.k8s.io"),
    ("/validate/nodemaintenances", "nodemaintenances", "nodemaintenance.k8s.io"),
    ("/validate/drainrules", "drainrules", "nodemaintenance.k8s.io"),
    ("/validate/pods", "pods", ""),
    ("/validate/nodes", "nodes", ""),
];

/// Oversized objects, as JSON.
struct OversizedObjects {
    deep: String,
    large: String,
    huge: String,
}

impl OversizedObjects {
    fn new() -> Self {
        let broad = |labels: usize| {
            let labels: Vec<_> = (0..labels).map(|number| format!("\"l{number}\":\"\"")).collect();
            format!("{{\"metadata\":{{\"name\":\"x\",\"labels\":{{{}}}}}}}", labels.join(","))
        };
        let deep = format!("{}1{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
        Self { deep, large: broad(200_000), huge: broad(1_000_000) }
    }
}

/// Sends every kind of request to every path.
async fn round(client: &Client, oversized: &OversizedObjects) {
    for (path, resource, group) in HOOKS {
        let fine = review(resource, group, &json!({"metadata": {"name": "x"}}));
        let without = |key: &str| {
            let mut review = fine.clone();
            review["request"].as_object_mut().unwrap().remove(key);
            review.to_string().into_bytes()
        };
        let with = |object: &str| {
            review(resource, group, &json!("HERE")).to_string().replace("\"HERE\"", object).into_bytes()
        };
        for object in ["null", "[]", "7", "{\"metadata\": []}", "{\"spec\": \"x\"}"] {
            let (code, body) = client.post(path, &with(object)).await;
            assert!(code == 200 && body.contains("\"uid\":\"u-1\""), "{path} {object}: {code} {body}");
        }
        for (what, body, expected) in [
            ("no uid", without("uid"), vec![400]),
            ("no operation", without("operation"), vec![400]),
            ("another kind", review("secrets", "", &json!({})).to_string().into_bytes(), vec![400]),
            ("no JSON", b"<xml/>".to_vec(), vec![400]),
            ("nothing", Vec::new(), vec![400]),
            ("invalid UTF-8", [with("\"").as_slice(), &[0xff, 0xfe]].concat(), vec![400]),
            ("deep", with(&oversized.deep), vec![200]),
            ("deep and open", "[".repeat(3 << 20).into_bytes(), vec![400]),
            ("large", with(&oversized.large), vec![200]),
            // If the answer overtakes the body, it can get lost.
            ("a million labels", with(&oversized.huge), vec![413, 0]),
        ] {
            let (code, answer) = client.post(path, &body).await;
            assert!(expected.contains(&code), "{path}, {what}: {code} {answer}");
        }
    }
}

/// Two hundred connections that never finish their handshake, and two hundred that never finish their request.
async fn hold_connections(client: &Client) {
    let mut half_open = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(client.address).await.unwrap();
        stream.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]).await.unwrap();
        half_open.push(stream);
    }
    let mut slow = Vec::new();
    for _ in 0..200 {
        let mut stream = client.connect().await;
        let head = "POST /validate/pods?timeout=1s HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n{";
        stream.write_all(head.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    for stream in half_open {
        read_to_close(stream).await;
    }
    for stream in slow {
        let answer = read_to_close(stream).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    }
}

/// Everything that the server sends until it closes the connection.
async fn read_to_close(mut stream: impl AsyncRead + Unpin) -> String {
    let mut rest = Vec::new();
    // A reset closes it, too.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.expect("the server disconnects");
    String::from_utf8_lossy(&rest).into_owned()
}

fn resident_mib(service: &Service) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", service.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[tokio::test]
#[ignore = "slow"]
async fn garbage_requests_do_not_grow_memory() {
    let cluster = cluster("webhook-hostile").await;
    let (_webhook, replica) = Webhook::with_replica(&cluster).await.unwrap();
    let client = Client {
        connector: connector(&cluster, "http/1.1").await,
        address: webhook::address(&replica).unwrap(),
    };

    let oversized = OversizedObjects::new();
    // The allocator keeps memory that it had once. What counts is that usage does not keep growing.
    for _ in 0..2 {
        round(&client, &oversized).await;
        hold_connections(&client).await;
    }
    let before = resident_mib(&replica);
    for _ in 0..2 {
        round(&client, &oversized).await;
        hold_connections(&client).await;
    }
    wait::eventually("all connections are closed", SOON, async || {
        // The API server keeps one or two.
        Ok((replica.metric("haulout_admission_connections").await? < 5.0).then_some(()))
    })
    .await
    .unwrap();
    let after = resident_mib(&replica);
    assert!(after <= before + before / 4 + 8, "from {before} MiB to {after} MiB");
    assert!(replica.try_wait().is_none(), "it is still alive");
    Webhook::reachable(&cluster).await.unwrap();
    drop(replica);
    cluster.shutdown().await;
}
