//! The cluster's certificate authority and its certificates. Everything is signed with the CA's key, so that another
//! process with access to the folder can add users.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

/// The first address of the Service range, which is always the API server's.
const SERVICE_IP: &str = "10.96.0.1";

/// The folder with the CA, the API server's certificate and the ServiceAccount keys.
#[derive(Debug)]
pub struct Pki {
    dir: PathBuf,
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

impl Pki {
    /// Creates a CA, the API server's certificate and the ServiceAccount key pair in `dir`.
    pub fn create(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("failed to create {}", dir.display()))?;
        let pki = Self::open(dir);
        let key = KeyPair::generate().context("failed to create the CA's key")?;
        let ca = authority().self_signed(&key).context("failed to create the CA's certificate")?;
        write_private(&pki.file("ca.key"), key.serialize_pem().as_bytes())?;
        write_private(&pki.ca_certificate_file(), ca.pem().as_bytes())?;

        let serving = pki.sign(serving_params()?, "the API server")?;
        write_private(&pki.file("apiserver.crt"), serving.certificate.as_bytes())?;
        write_private(&pki.file("apiserver.key"), serving.key.as_bytes())?;

        let tokens = KeyPair::generate().context("failed to create the ServiceAccount key")?;
        write_private(&pki.file("sa.key"), tokens.serialize_pem().as_bytes())?;
        write_private(&pki.file("sa.pub"), tokens.public_key_pem().as_bytes())?;
        Ok(pki)
    }

    /// The CA that [`Pki::create`] created in this folder.
    pub fn open(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The path of one of its files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The path of the CA's certificate.
    pub fn ca_certificate_file(&self) -> PathBuf {
        self.file("ca.crt")
    }

    /// The CA's certificate.
    pub fn ca_certificate(&self) -> Result<String> {
        let path = self.ca_certificate_file();
        fs::read_to_string(&path).with_context(|| format!("failed to read the CA {}", path.display()))
    }

    /// A client certificate for this user with at most two groups, because the certificate library keeps one value per
    /// kind of name, and an organization has two spellings.
    pub fn client(&self, user: &str, groups: &[&str]) -> Result<Credentials> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, user);
        let spellings = [DnType::OrganizationName, DnType::CustomDnType(vec![2, 5, 4, 10])];
        if groups.len() > spellings.len() {
            bail!("a user certificate holds at most {} groups, {user} has {}", spellings.len(), groups.len());
        }
        for (spelling, group) in spellings.into_iter().zip(groups) {
            params.distinguished_name.push(spelling, *group);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params, user)
    }

    /// A serving certificate for webhooks that the API server reaches on loopback.
    pub fn serving(&self, names: &[&str]) -> Result<Credentials> {
        let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names).context("invalid name for a serving certificate")?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params, "a server")
    }

    fn sign(&self, params: CertificateParams, whose: &str) -> Result<Credentials> {
        let ca_key = fs::read_to_string(self.file("ca.key")).context("failed to read the CA's key")?;
        let ca_key = KeyPair::from_pem(&ca_key).context("failed to read the CA's key")?;
        let issuer = Issuer::new(authority(), ca_key);
        let key = KeyPair::generate().with_context(|| format!("failed to create a key for {whose}"))?;
        let certificate = params
            .signed_by(&key, &issuer)
            .with_context(|| format!("failed to sign the certificate of {whose}"))?;
        Ok(Credentials { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// The CA's parameters. They are constant, so that the key is enough to sign.
fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "haulout-e2e");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params
}

fn serving_params() -> Result<CertificateParams> {
    let names = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ];
    let mut params =
        CertificateParams::new(names.map(str::to_owned)).context("invalid name for the API server")?;
    for address in ["127.0.0.1", SERVICE_IP, crate::real_node::API_SERVER] {
        let address: IpAddr = address.parse().context("failed to read the API server's address")?;
        params.subject_alt_names.push(SanType::IpAddress(address));
    }
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    Ok(params)
}

/// Writes a file that only its owner can read.
pub(crate) fn write_private(path: &Path, contents: &[u8]) -> Result<()> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(contents))
        .with_context(|| format!("failed to write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn files_are_private_and_users_can_be_added_later() {
        let dir = tempfile::tempdir().unwrap();
        Pki::create(dir.path()).unwrap();
        for entry in fs::read_dir(dir.path()).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", entry.path());
        }
        let alice = Pki::open(dir.path()).client("alice", &["devs", "admins"]).unwrap();
        assert!(alice.certificate.starts_with("-----BEGIN CERTIFICATE"));
        assert!(alice.key.contains("PRIVATE KEY"));
    }

    #[test]
    fn third_group_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let error = pki.client("alice", &["a", "b", "c"]).unwrap_err();
        assert_eq!(error.to_string(), "a user certificate holds at most 2 groups, alice has 3");
    }
}
